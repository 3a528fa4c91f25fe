"""Evaluation: perplexity on text files with a sliding window, and the tasks of lm-evaluation-harness.

May import everything of te_models; nothing but the command line imports it.
"""

from .perplexity import TextScore, score_documents

__all__ = ["TextScore", "score_documents"]
