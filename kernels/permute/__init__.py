"""Moving tokens to their experts and back: sort rows by expert, and the weighted sum of each token's K results."""

from .capacity import capacity_share, expert_capacity, fill_to_capacity, within_capacity
from .op import Permutation, permute, sort_by_expert, unpermute
from .quantized import permute_quantized

__all__ = [
    "Permutation",
    "capacity_share",
    "expert_capacity",
    "fill_to_capacity",
    "permute",
    "permute_quantized",
    "sort_by_expert",
    "unpermute",
    "within_capacity",
]
