"""Cross entropy of next-token prediction, from logits or straight from hidden states and the output weight."""

from .op import IGNORE_INDEX, cross_entropy, linear_cross_entropy, output_logits, shift_labels

__all__ = ["IGNORE_INDEX", "cross_entropy", "linear_cross_entropy", "output_logits", "shift_labels"]
