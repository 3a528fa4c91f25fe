"""A layer built on "meta" has no values; `reset_parameters` makes those of a layer that was built on a device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **device: te.Linear(64, 32, **device),
    "LayerNormLinear": lambda **device: te.LayerNormLinear(32, 64, **device),
    "LayerNormMLP": lambda **device: te.LayerNormMLP(32, 64, **device),
    "GroupedLinear": lambda **device: te.GroupedLinear(2, 64, 32, **device),
    "per GEMM": lambda **device: te.GroupedLinear(2, 64, 32, single_grouped_weight=False, **device),
    "RMSNorm": lambda **device: te.RMSNorm(32, **device),
}


def values(parameter: Tensor) -> Tensor:
    return parameter.dequantize() if isinstance(parameter, te.QuantizedTensor) else parameter


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "recipe", [None, te.MXFP8BlockScaling(), te.DelayedScaling()], ids=["plain", "mxfp8", "delayed"]
)
def test_reset_parameters_makes_them(name: str, recipe: te.Recipe | None) -> None:
    with te.quantized_model_init(recipe is not None, recipe, preserve_high_precision_init_val=True):
        expected = LAYERS[name]()
        layer = LAYERS[name](device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    first: Any = next(layer.parameters())
    first.sequence_parallel = True
    first.requires_grad_(False)
    torch.manual_seed(0)
    layer.reset_parameters()
    found: Any = next(layer.parameters())
    assert found.sequence_parallel is True and not found.requires_grad
    for (key, own), (_, wanted) in zip(layer.named_parameters(), expected.named_parameters(), strict=True):
        assert type(own) is type(wanted) and own.device.type == "cpu" and own.dtype == wanted.dtype
        assert torch.equal(values(own), values(wanted)), key
        if isinstance(own, te.QuantizedTensor):
            assert torch.equal(own.get_high_precision_init_val(), wanted.get_high_precision_init_val())


def test_parameters_come_to_the_default_device_and_compute() -> None:
    with torch.device("meta"):
        layer = te.Linear(32, 32)
        layer.reset_parameters()
    assert layer.weight.device.type == "cpu"
    with te.autocast(recipe=te.DelayedScaling()):
        layer(torch.randn(4, 32)).sum().backward()
    assert layer.fp8_scale[0].item() != 1


def test_a_layer_with_values_keeps_its_parameters() -> None:
    with te.quantized_model_init(recipe=te.MXFP8BlockScaling()):
        layer = te.Linear(32, 32)
    weight, before = layer.weight, layer.weight.dequantize()
    layer.reset_parameters()
    assert layer.weight is weight and not torch.equal(weight.dequantize(), before)
