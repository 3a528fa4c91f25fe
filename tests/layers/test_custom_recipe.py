"""Which quantizers a custom recipe's factory is asked for and may return."""

from __future__ import annotations

import pytest
import torch

from te_models.layers import (
    CustomRecipe,
    GroupedLinear,
    HybridQuantizer,
    IdentityQuantizer,
    Linear,
    MXFP8Quantizer,
    Quantizer,
    autocast,
    quantized_model_init,
)
from te_models.layers.delayed import DelayedScalingQuantizer


@pytest.mark.parametrize("grouped", [False, True])
def test_a_custom_recipe_stores_weights_of_layers_without_a_name(grouped: bool) -> None:
    """Its factory need not look at names; one that does sees an empty one, when computing as when storing."""
    chosen = CustomRecipe(qfactory=lambda role: MXFP8Quantizer() if role.name == "" else IdentityQuantizer())
    with quantized_model_init(recipe=chosen):
        layer = GroupedLinear(2, 32, 16, bias=False) if grouped else Linear(32, 16, bias=False)
    assert layer.weight.quantizer == MXFP8Quantizer()
    with autocast(recipe=chosen):
        layer(torch.randn(4, 32), *([torch.tensor([1, 3])] if grouped else [])).sum().backward()
        assert torch.count_nonzero(layer.weight.grad) > 0
        layer.name = "there"
        with pytest.raises(ValueError, match="the weight is stored as mxfp8, but the recipe in force wants identity"):
            layer(torch.randn(4, 32), *([torch.tensor([1, 3])] if grouped else []))


@pytest.mark.parametrize(
    "made",
    [
        DelayedScalingQuantizer(),
        HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=DelayedScalingQuantizer()),
    ],
    ids=["delayed", "hybrid"],
)
def test_delayed_scaling_is_not_for_factories(made: Quantizer) -> None:
    """Nobody would keep its scales."""
    chosen = CustomRecipe(qfactory=lambda role: made if role.tensor == "weight" else MXFP8Quantizer())
    with autocast(recipe=chosen), pytest.raises(TypeError, match=r"returned a DelayedScalingQuantizer .*'weight'"):
        Linear(32, 16)(torch.randn(4, 32))
    with quantized_model_init(recipe=chosen), pytest.raises(TypeError, match="allowed: a quantizer of another class"):
        Linear(32, 16)
