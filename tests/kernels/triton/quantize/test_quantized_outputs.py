"""Norms, activations and the permutation that hand out FP8: bit for bit what the two steps give one after the other."""

import pytest
import torch

from te_models.kernels.activation import op as activation_op
from te_models.kernels.activation import quantized as activation
from te_models.kernels.custom_op import flatten
from te_models.kernels.norm import op as norm_op
from te_models.kernels.norm import quantized as norm
from te_models.kernels.permute import quantized as permute
from te_models.kernels.permute import reference as permute_reference
from te_models.kernels.quantize.output import QuantizedOutput
from tests.kernels.triton.op_inputs import OUTPUTS, scale_for
from tests.kernels.triton.quantize.quantize_cases import assert_bitwise, hard

E5M2 = torch.float8_e5m2
# centered, zero_centered, weight_last, has weight, has bias
NORMS = [(False, False, True, True, False), (True, True, False, True, True), (True, False, True, False, False)]
ACTIVATIONS = [("silu", True, None, 1.0, 0.0), ("squared_relu", False, None, 1.0, 0.0), ("silu", True, 1.3, 1.7, 1.0)]
SHAPES = [(33, 130), (130, 20), (1, 1), (0, 128)]
REAL = [(8192, 4096), (4097, 7168), (100_003, 768)]
EPS = 1e-5


def names(output: QuantizedOutput) -> str:
    copies = "rows" * output.rowwise + "columns" * output.columnwise
    return f"{output.block}-{output.scale_kind}-{str(output.fp8_dtype)[-6:]}-{copies}"


def compare(got, y, scale, output) -> None:
    """y: the result in high precision, as the operation without quantization makes it."""
    expected = output.define(y, scale)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b)


def check_norm(device, shape, dtype, option, output) -> None:
    centered, zero_centered, weight_last, has_weight, has_bias = option
    x = hard(shape, dtype).to(device)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape[1], generator=generator).to(dtype).to(device) if has_weight else None
    bias = torch.randn(shape[1], generator=generator).to(dtype).to(device) if has_bias else None
    flags = (EPS, centered, zero_centered, weight_last)
    scale = scale_for(output, device)
    *copies, mean, rstd = norm.norm_quantized(x, weight, bias, *flags, scale, *flatten(output))
    y, plain_mean, plain_rstd = norm_op.norm_fwd(x, weight, bias, *flags)
    compare(copies, y, scale, output)
    assert_bitwise(mean, plain_mean)
    assert_bitwise(rstd, plain_rstd)


def check_activation(device, shape, dtype, option, weighted, output) -> None:
    x = hard((shape[0], shape[1] * (2 if option[1] else 1)), dtype).clamp(-1e4, 1e4).to(device)
    weights = torch.rand(shape[0], generator=torch.Generator().manual_seed(0)).to(device) if weighted else None
    scale = scale_for(output, device)
    got = activation.activation_quantized_op(x, weights, *option, scale, *flatten(output))
    compare(got, activation_op.activation_fwd(x, weights, *option), scale, output)


def check_permute(device, case, dtype, output) -> None:
    tokens, topk, experts, hidden, align = case
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    p = permute_reference.sort_by_expert(scores.argsort(dim=-1)[:, :topk].to(device), experts, align)
    x, scale = hard((tokens, hidden), dtype).to(device), scale_for(output, device)
    got = permute.permute_quantized_op(x, p.slot_of_row, topk, scale, *flatten(output))
    compare(got, permute_reference.gather_rows(x, p.slot_of_row, topk, align > 1), scale, output)


@pytest.mark.sentinels(
    "(True, True, False, True, True)-0-pow2-8_e5m2-rowscolumns",
    "(False, False, True, True, False)-128-float32-8_e5m2-rowscolumns",
    "(False, False, True, True, False)-32-e8m0-e4m3fn-rows",
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("output", OUTPUTS, ids=names)
@pytest.mark.parametrize("option", NORMS, ids=str)
def test_norm(device, option, output) -> None:
    for shape in SHAPES[:2]:
        check_norm(device, shape, torch.bfloat16, option, output)


@pytest.mark.sentinels(
    "torch.float16-(130, 20)-32-e8m0-e4m3fn-rows",
    "torch.float32-(130, 20)-0-pow2-8_e5m2-rowscolumns",
    "torch.float16-(33, 130)-128-pow2-e4m3fn-rowscolumns",
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("output", [OUTPUTS[1], OUTPUTS[4], OUTPUTS[6]], ids=names)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_sizes(device, dtype, shape, output) -> None:
    check_norm(device, shape, dtype, NORMS[1], output)


@pytest.mark.sentinels(
    "('silu', True, None, 1.0, 0.0)-32-e8m0-e4m3fn-rowscolumns",
    "('silu', True, None, 1.0, 0.0)-128-float32-8_e5m2-rowscolumns",
    "('silu', True, 1.3, 1.7, 1.0)-0-pow2-e4m3fn-columns",
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("output", OUTPUTS, ids=names)
@pytest.mark.parametrize("option", ACTIVATIONS, ids=str)
def test_activation(device, option, output) -> None:
    for shape, weighted in ((SHAPES[0], True), (SHAPES[1], False), (SHAPES[3], False)):
        check_activation(device, shape, torch.bfloat16, option, weighted, output)


# T, K, E, H, align
PERMUTATIONS = [(17, 3, 5, 33, 1), (5, 2, 4, 130, 32), (3, 2, 3, 20, 128), (0, 2, 4, 8, 16)]


@pytest.mark.sentinels("128-pow2-e4m3fn-rows", "32-e8m0-e4m3fn-rowscolumns", "0-pow2-8_e5m2-rowscolumns")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("output", OUTPUTS, ids=names)
def test_permute(device, output) -> None:
    for case in PERMUTATIONS:
        check_permute(device, case, torch.bfloat16, output)


@pytest.mark.gpu
@pytest.mark.parametrize("output", OUTPUTS, ids=names)
def test_real_sizes(device, output) -> None:
    for shape in REAL:
        check_norm(device, shape, torch.bfloat16, NORMS[0], output)
        check_activation(device, shape, torch.bfloat16, ACTIVATIONS[0], True, output)
    check_permute(device, (8192, 8, 128, 2048, 128), torch.bfloat16, output)
