"""The six recipes of the compile matrices, and a new but equal object of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from te_models.layers import CustomRecipe, QuantizerRole, Recipe, quantized_model_init, recipe, store_weights
from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    Quantizer,
)
from te_models.layers.whole_model import quantized_modules

NAMES = [None, "delayed", "current", "block", "mxfp8", "nvfp4", "custom"]
"""None: no recipe. "custom": MXFP8 forward, per tensor for the input's gradient, blocks for the weight's."""


def _by_role(role: QuantizerRole) -> Quantizer:
    forward, dgrad, wgrad = MXFP8Quantizer(), Float8CurrentScalingQuantizer(), Float8BlockQuantizer(block_scaling_dim=1)
    if role.tensor == "grad_output":
        gradient = Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
        return HybridQuantizer(rowwise_quantizer=gradient, columnwise_quantizer=wgrad)
    columnwise = dgrad if role.tensor == "weight" else wgrad
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=columnwise)


_CUSTOM = CustomRecipe(qfactory=_by_role)


def fresh(name: str | None) -> Recipe | None:
    """Return a new object that equals every other of this name; for "custom", whose value is its identity, the one."""
    if name is None or name == "custom":
        return _CUSTOM if name else None
    return Recipe.from_json(recipe(name).to_json())


def build_stored(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """Return a module whose weights are stored in the recipe's format."""
    if name != "custom":
        with quantized_model_init(recipe=fresh(name)):
            return build()
    module = build()
    for qualified, layer in quantized_modules(module):
        layer.name = qualified or "layer"  # a recipe that chooses by name needs one
    store_weights(module, fresh(name))
    return module
