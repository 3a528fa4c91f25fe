"""Cross entropy of next-token prediction, from logits or straight from hidden states and the output weight."""

from .kl import linear_kl
from .log_probs import CHUNK_TOKENS, label_log_prob_gradients, label_statistics
from .op import cross_entropy, linear_cross_entropy
from .reference import IGNORE_INDEX, output_logits, shift_labels
from .shards import combined_loss, shard_gradient, shard_statistics
from .z_loss import cross_entropy_and_z_loss, linear_cross_entropy_and_z_loss

__all__ = [
    "CHUNK_TOKENS",
    "IGNORE_INDEX",
    "combined_loss",
    "cross_entropy",
    "cross_entropy_and_z_loss",
    "label_log_prob_gradients",
    "label_statistics",
    "linear_cross_entropy",
    "linear_cross_entropy_and_z_loss",
    "linear_kl",
    "output_logits",
    "shard_gradient",
    "shard_statistics",
    "shift_labels",
]
