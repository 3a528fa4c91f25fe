"""Quantized parameters behave as parameters: updates reach their storage, copies keep their form, layouts exchange."""

import pytest
import torch
from torch import nn

import te_models.layers as te
from tests.compare import refused, same_bits
from tests.layers.matrix_recipes import NAMES, fresh

RECIPES = [name for name in NAMES if name is not None]


@pytest.fixture(params=[(n, g) for n in RECIPES for g in (False, True)], ids=str)
def quantized(request) -> te.QuantizedTensor:
    name, grouped = request.param
    torch.manual_seed(0)
    quantizer = fresh(name).weight_quantizer()
    return quantizer.quantize_grouped(torch.randn(3, 40, 72)) if grouped else quantizer.quantize(torch.randn(40, 72))


def test_the_logical_tensor_is_what_users_see(quantized: te.QuantizedTensor) -> None:
    assert quantized.dtype == torch.float32
    assert isinstance(quantized, te.GroupedTensor) == (quantized.dim() == 3)
    values = quantized.dequantize()
    assert type(values) is torch.Tensor and torch.equal(quantized + 1, values + 1)
    assert torch.equal(quantized.sum(), values.sum())
    assert quantized.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert type(quantized).__name__ in repr(quantized)


def test_in_place_operations_requantize_into_the_same_storage(quantized: te.QuantizedTensor) -> None:
    before, pointers = quantized.dequantize(), [f.data_ptr() for f in quantized.fields.values()]
    quantized.mul_(2.0)
    assert same_bits(quantized, quantized.quantizer.quantize_fields(before * 2))
    quantized.copy_(before + 1.0)
    assert same_bits(quantized, quantized.quantizer.quantize_fields(before + 1.0))
    assert [f.data_ptr() for f in quantized.fields.values()] == pointers


@pytest.mark.parametrize("foreach", [False, True])
def test_adamw_moves_weights_and_keeps_plain_moments(quantized: te.QuantizedTensor, foreach: bool) -> None:
    parameter = nn.Parameter(quantized.clone())
    parameter.grad = torch.ones(parameter.shape)
    optimizer = torch.optim.AdamW([parameter], lr=0.5, foreach=foreach)
    optimizer.step()
    moved = (parameter.dequantize() - quantized.dequantize()).mean().item()
    assert -0.6 < moved < -0.4 and type(optimizer.state[parameter]["exp_avg"]) is torch.Tensor


def test_wrong_input_is_refused() -> None:
    quantizer = te.recipe("mxfp8").weight_quantizer()
    refused(lambda: quantizer.quantize_grouped(torch.randn(3, 4)), "3-D")
    refused(lambda: quantizer.quantize(torch.ones(3, 4, dtype=torch.int64)), "floating-point")
    refused(lambda: quantizer.quantize(torch.randn(3, 4)).quantize_(torch.randn(4, 3)), "shape")
    with pytest.raises(ValueError, match="columnwise"):
        quantizer.with_usage(rowwise=True, columnwise=False).quantize(torch.randn(32, 32)).operand(
            "columnwise", torch.float32
        )


def test_a_group_is_put_together_of_its_members() -> None:
    grouped = te.recipe("mxfp8").weight_quantizer().quantize_grouped(torch.randn(3, 32, 64))
    assert same_bits(te.GroupedTensor.from_members(grouped.members()), grouped)
    other = te.Float8BlockQuantizer().quantize(torch.randn(32, 64))
    refused(lambda: te.GroupedTensor.from_members([grouped.member(1), other]), "member 1")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_across_layouts_without_dequantizing(name: str, assign: bool) -> None:
    with te.quantized_model_init(recipe=fresh(name)):
        grouped = te.GroupedLinear(3, 64, 32, bias=True)
        split = te.GroupedLinear(3, 64, 32, bias=True, single_grouped_weight=False)
        target = te.GroupedLinear(3, 64, 32, bias=True)
    split.load_state_dict(grouped.state_dict(), assign=assign)
    target.load_state_dict(split.state_dict(), assign=assign)
    assert isinstance(target.weight, te.GroupedTensor) and same_bits(target.weight, grouped.weight)
    x = torch.randn(9, 64)
    with te.autocast(recipe=fresh(name)):
        outputs = [layer(x, [4, 0, 5]) for layer in (grouped, split, target)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_partial_set_of_members_is_an_error() -> None:
    layer = te.GroupedLinear(3, 8, 8, bias=False)
    refused(lambda: layer.load_state_dict({"weight0": torch.zeros(8, 8)}), "lacks weight1, weight2", error=RuntimeError)


def test_members_that_do_not_fit_each_other_or_the_layer_are_an_error() -> None:
    layer = te.GroupedLinear(2, 32, 32, bias=False)
    mixed = {"weight0": torch.zeros(32, 32), "weight1": te.MXFP8Quantizer()(torch.zeros(32, 32))}
    with pytest.raises(RuntimeError, match="has weight0 in high precision and weight1 quantized"):
        layer.load_state_dict(mixed)
    layer = te.GroupedLinear(2, 32, 32, bias=False, single_grouped_weight=False)
    with pytest.raises(RuntimeError, match="weight has 3 members; expected 2"):
        layer.load_state_dict({"weight": torch.zeros(3, 32, 32)})
