"""Fused operations: several basic ones in one step. `FUSIONS` lists what the fuser looks for."""

from ..operation import FusedOperation
from .grouped_mlp import ForwardGroupedMLP
from .linear import BackwardLinearAdd, ForwardLinearBiasActivation, ForwardLinearBiasAdd, ForwardLinearScaleAdd

FUSIONS: list[type[FusedOperation]] = [
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    ForwardGroupedMLP,
    BackwardLinearAdd,
]
"""What the fuser looks for; of two that fit at a place it takes the longer one, then the earlier."""

__all__ = [
    "FUSIONS",
    "BackwardLinearAdd",
    "ForwardGroupedMLP",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]
