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
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    autocast,
    quantized_model_init,
)
from te_models.layers.quantizer.delayed import DelayedScalingQuantizer
from te_models.layers.recipe import recipe_use


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


def test_the_factory_is_asked_for_the_layer_at_hand_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine's, for each tensor of a layer when that layer first runs; while nothing was traced."""
    monkeypatch.setattr(recipe_use._Traced, "anything", False)
    asked: list[QuantizerRole] = []

    def factory(role: QuantizerRole) -> Quantizer:
        asked.append(role)
        return MXFP8Quantizer()

    other, layer, experts = Linear(32, 32, name="other"), Linear(32, 32, name="qkv"), GroupedLinear(2, 32, 32)
    chosen = CustomRecipe(qfactory=factory)
    for _ in range(2):
        with autocast(recipe=chosen):
            for _ in range(2):
                layer(torch.randn(4, 32)).sum().backward()
    assert asked == [QuantizerRole("linear", t, "qkv", "Linear") for t in ("input", "weight", "grad_output")]
    with autocast(recipe=chosen):
        experts(torch.randn(4, 32), [1, 3])
    assert {(role.module_type, role.name) for role in asked[3:]} == {("grouped_linear", "")} and len(asked) == 6
    del other


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
    chosen = CustomRecipe(qfactory=lambda role: made if role.tensor_type == "weight" else MXFP8Quantizer())
    with autocast(recipe=chosen), pytest.raises(TypeError, match=r"returned a DelayedScalingQuantizer .*'weight'"):
        Linear(32, 16)(torch.randn(4, 32))
    with quantized_model_init(recipe=chosen), pytest.raises(TypeError, match="allowed: a quantizer of another class"):
        Linear(32, 16)


PLAIN, TRANSFORMED = NVFP4Quantizer(), NVFP4Quantizer(with_rht=True)
ONE_SIDED = "input has the random Hadamard transform and grad_output has not"


@pytest.mark.parametrize(
    "x, weight, dy, refused",
    [
        (PLAIN, PLAIN, TRANSFORMED, "grad_output has the random Hadamard transform and input has not"),
        (MXFP8Quantizer(), MXFP8Quantizer(), TRANSFORMED, "grad_output has the random Hadamard transform"),
        (TRANSFORMED, PLAIN, IdentityQuantizer(), ONE_SIDED),
        (HybridQuantizer(rowwise_quantizer=PLAIN, columnwise_quantizer=TRANSFORMED), PLAIN, PLAIN, ONE_SIDED),
        (TRANSFORMED, TRANSFORMED, TRANSFORMED, "weight has the random Hadamard transform, which grad_output has not"),
        (HybridQuantizer(rowwise_quantizer=TRANSFORMED, columnwise_quantizer=PLAIN), PLAIN, PLAIN, None),
        (HybridQuantizer(rowwise_quantizer=PLAIN, columnwise_quantizer=TRANSFORMED), PLAIN, TRANSFORMED, None),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_hadamard_transform_has_to_cancel(
    x: Quantizer, weight: Quantizer, dy: Quantizer, refused: str | None, grouped: bool
) -> None:
    quantizers = {"input": x, "weight": weight, "grad_output": dy}
    chosen = CustomRecipe(qfactory=lambda role: quantizers[role.tensor_type])
    layer = GroupedLinear(2, 64, 48, bias=False) if grouped else Linear(64, 48, bias=False)
    splits = (torch.tensor([40, 24]),) if grouped else ()
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def run(chosen: CustomRecipe | None) -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = values.clone().requires_grad_()
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(leaf, *splits)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        return [leaf.grad, layer.weight.grad]

    if refused:
        with pytest.raises(ValueError, match=refused):
            run(chosen)
        run(CustomRecipe(qfactory=chosen.qfactory, backward_override="dequantized"))  # those GEMMs do not run
        return
    for found, exact in zip(run(chosen), run(None), strict=True):
        assert (found - exact).norm() < 0.25 * exact.norm()
