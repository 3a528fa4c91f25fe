"""Attention of each query to the few keys that an indexer chooses (DeepSeek Sparse Attention, arXiv 2512.02556).

reference  the definition, with all scores          select  the indexer's scores and the best keys
attend     attention to the chosen keys             loss    what trains the indexer
blocks     queries a block after the other
"""

from .attend import sparse_attention
from .loss import indexer_loss
from .select import select_keys

__all__ = ["indexer_loss", "select_keys", "sparse_attention"]
