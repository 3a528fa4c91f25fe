"""Moving tokens to their experts and back: sort rows by expert, and the weighted sum of each token's K results."""

from .op import Permutation, permute, sort_by_expert, unpermute

__all__ = ["Permutation", "permute", "sort_by_expert", "unpermute"]
