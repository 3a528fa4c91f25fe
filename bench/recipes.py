"""The recipes that the benchmarks and the matrices of tests run."""

from __future__ import annotations

import torch

from te_models.layers import CustomRecipe, QuantizerRole, Recipe, recipe
from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    Quantizer,
)

NAMES = ("delayed", "current", "block", "mxfp8", "nvfp4", "custom")


def _by_role(role: QuantizerRole) -> Quantizer:
    forward, dgrad, wgrad = MXFP8Quantizer(), Float8CurrentScalingQuantizer(), Float8BlockQuantizer(block_scaling_dim=1)
    if role.tensor_type == "grad_output":
        gradient = Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
        return HybridQuantizer(rowwise_quantizer=gradient, columnwise_quantizer=wgrad)
    columnwise = dgrad if role.tensor_type == "weight" else wgrad
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=columnwise)


CUSTOM = CustomRecipe(qfactory=_by_role)
"""MXFP8 forward, one scale per tensor for the input's gradient, 128-blocks for the weight's."""


def named(name: str) -> Recipe | None:
    """Return the recipe of one of NAMES, CUSTOM or one with its defaults; None for "bf16"."""
    if name == "bf16":
        return None
    return CUSTOM if name == "custom" else recipe(name)
