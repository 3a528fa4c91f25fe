"""Which quantizers a custom recipe's factory is asked for and may return."""

import pytest
import torch

import te_models.layers as te
from te_models.layers.quantizer.delayed import DelayedScalingQuantizer
from te_models.layers.recipe import recipe_use
from tests.compare import refused


@pytest.mark.parametrize("grouped", [False, True])
def test_a_custom_recipe_stores_weights_of_layers_without_a_name(grouped: bool) -> None:
    """Its factory need not look at names; one that does sees an empty one, when computing as when storing."""
    chosen = te.CustomRecipe(qfactory=lambda role: te.MXFP8Quantizer() if role.name == "" else te.IdentityQuantizer())
    with te.quantized_model_init(recipe=chosen):
        layer = te.GroupedLinear(2, 32, 16, bias=False) if grouped else te.Linear(32, 16, bias=False)
    assert layer.weight.quantizer == te.MXFP8Quantizer()
    with te.autocast(recipe=chosen):
        layer(torch.randn(4, 32), *([torch.tensor([1, 3])] if grouped else [])).sum().backward()
        assert torch.count_nonzero(layer.weight.grad) > 0
        layer.name = "there"
        with pytest.raises(ValueError, match="the weight is stored as mxfp8, but the recipe in force wants identity"):
            layer(torch.randn(4, 32), *([torch.tensor([1, 3])] if grouped else []))


def test_the_factory_is_asked_for_the_layer_at_hand_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine's, for each tensor of a layer when that layer first runs; while nothing was traced."""
    monkeypatch.setattr(recipe_use._Traced, "anything", False)
    asked: list[te.QuantizerRole] = []

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        asked.append(role)
        return te.MXFP8Quantizer()

    other, layer, experts = te.Linear(32, 32, name="other"), te.Linear(32, 32, name="qkv"), te.GroupedLinear(2, 32, 32)
    chosen = te.CustomRecipe(qfactory=factory)
    for _ in range(2):
        with te.autocast(recipe=chosen):
            for _ in range(2):
                layer(torch.randn(4, 32)).sum().backward()
    assert asked == [te.QuantizerRole("linear", t, "qkv", "Linear") for t in ("input", "weight", "grad_output")]
    with te.autocast(recipe=chosen):
        experts(torch.randn(4, 32), [1, 3])
    assert {(role.module_type, role.name) for role in asked[3:]} == {("grouped_linear", "")} and len(asked) == 6
    del other


@pytest.mark.parametrize(
    "made",
    [
        DelayedScalingQuantizer(),
        te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=DelayedScalingQuantizer()),
    ],
    ids=["delayed", "hybrid"],
)
def test_delayed_scaling_is_not_for_factories(made: te.Quantizer) -> None:
    """Nobody would keep its scales."""
    chosen = te.CustomRecipe(qfactory=lambda role: made if role.tensor_type == "weight" else te.MXFP8Quantizer())
    with te.autocast(recipe=chosen), pytest.raises(TypeError, match=r"returned a DelayedScalingQuantizer .*'weight'"):
        te.Linear(32, 16)(torch.randn(4, 32))
    with te.quantized_model_init(recipe=chosen):
        refused(lambda: te.Linear(32, 16), "allowed: a quantizer of another class", error=TypeError)


PLAIN, TRANSFORMED = te.NVFP4Quantizer(), te.NVFP4Quantizer(with_rht=True)
ONE_SIDED = "input has the random Hadamard transform and grad_output has not"


@pytest.mark.parametrize(
    "x, weight, dy, refused",
    [
        (PLAIN, PLAIN, TRANSFORMED, "grad_output has the random Hadamard transform and input has not"),
        (te.MXFP8Quantizer(), te.MXFP8Quantizer(), TRANSFORMED, "grad_output has the random Hadamard transform"),
        (TRANSFORMED, PLAIN, te.IdentityQuantizer(), ONE_SIDED),
        (te.HybridQuantizer(rowwise_quantizer=PLAIN, columnwise_quantizer=TRANSFORMED), PLAIN, PLAIN, ONE_SIDED),
        (TRANSFORMED, TRANSFORMED, TRANSFORMED, "weight has the random Hadamard transform, which grad_output has not"),
        (te.HybridQuantizer(rowwise_quantizer=TRANSFORMED, columnwise_quantizer=PLAIN), PLAIN, PLAIN, None),
        (te.HybridQuantizer(rowwise_quantizer=PLAIN, columnwise_quantizer=TRANSFORMED), PLAIN, TRANSFORMED, None),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_hadamard_transform_has_to_cancel(
    x: te.Quantizer, weight: te.Quantizer, dy: te.Quantizer, refused: str | None, grouped: bool
) -> None:
    quantizers = {"input": x, "weight": weight, "grad_output": dy}
    chosen = te.CustomRecipe(qfactory=lambda role: quantizers[role.tensor_type])
    layer = te.GroupedLinear(2, 64, 48, bias=False) if grouped else te.Linear(64, 48, bias=False)
    splits = (torch.tensor([40, 24]),) if grouped else ()
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def run(chosen: te.CustomRecipe | None) -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = values.clone().requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(leaf, *splits)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        return [leaf.grad, layer.weight.grad]

    if refused:
        with pytest.raises(ValueError, match=refused):
            run(chosen)
        run(te.CustomRecipe(qfactory=chosen.qfactory, backward_override="dequantized"))  # those GEMMs do not run
        return
    for found, exact in zip(run(chosen), run(None), strict=True):
        assert (found - exact).norm() < 0.25 * exact.norm()
