"""Rows that come quantized into GroupedLinear: the bits of plain rows, and no second quantization."""

import pytest
import torch
from torch import Tensor

from te_models.layers import GroupedLinear, GroupedRows, Quantizer, autocast, recipe
from te_models.layers.gemm import product as gemm_operand
from te_models.layers.gemm import quantized_rows
from tests.compare import refused
from tests.layers.te.ops.steps import assert_equal, fresh, reset

NAMES = ["current", "block", "mxfp8", "nvfp4"]
SPLITS = [([5, 0, 37], 50), ([0, 0, 0], 4), ([64, 32, 0], 96)]


def input_quantizer(module: GroupedLinear, name: str) -> Quantizer:
    with autocast(recipe=fresh(name)):
        quantizers = module.gemm_quantizers()
    assert isinstance(quantizers.input, Quantizer)
    return quantizers.input.with_usage(rowwise=True, columnwise=True)


def run(module: GroupedLinear, x: Tensor, m_splits: Tensor, name: str) -> list[Tensor]:
    reset(module)
    with autocast(recipe=fresh(name)):
        y = module(x, m_splits)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [y.detach(), *(p.grad for p in module.parameters())]


@pytest.mark.filterwarnings("ignore:.* runs as emulation:RuntimeWarning")  # NVFP4, which nothing multiplies here
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("splits", "rows"), SPLITS, ids=str)
def test_they_have_the_bits_of_plain_rows(
    splits: list[int], rows: int, name: str, accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator:
        monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    torch.manual_seed(0)
    module = GroupedLinear(3, 96, 64, bias=True, params_dtype=torch.bfloat16)
    x, m_splits = torch.randn(rows, 96).bfloat16(), torch.tensor(splits)
    expected = run(module, x, m_splits, name)
    quantized = GroupedRows.quantize_rows(x, m_splits, input_quantizer(module, name))

    def no_values(self: GroupedRows, *arguments: object) -> Tensor:
        raise AssertionError("the rows were dequantized")

    monkeypatch.setattr(GroupedRows, "dequantize", no_values)
    assert_equal(run(module, quantized, m_splits, name), expected)


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_the_gradient_of_their_values(name: str) -> None:
    module, m_splits = GroupedLinear(3, 96, 64, bias=False), torch.tensor([5, 0, 37])
    x = torch.randn(50, 96, requires_grad=True)
    run(module, x, m_splits, name)
    quantized = GroupedRows.quantize_rows(x, m_splits, input_quantizer(module, name)).requires_grad_()
    run(module, quantized, m_splits, name)
    assert quantized.grad is not None and x.grad is not None
    assert torch.equal(quantized.grad, x.grad)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_under_the_compiler(backend: str) -> None:
    module, m_splits = GroupedLinear(3, 96, 64, bias=False), torch.tensor([5, 0, 37])
    quantized = GroupedRows.quantize_rows(torch.randn(50, 96), m_splits, input_quantizer(module, "mxfp8"))
    with autocast(recipe=recipe("mxfp8")):
        expected = module(quantized, m_splits)
        found = torch.compile(module, fullgraph=True, backend=backend)(quantized, m_splits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [None, "delayed", "block", "dequantized"])
def test_where_their_numbers_do_not_serve_their_values_do(name: str | None) -> None:
    """Another format, delayed scaling, a backward pass of another precision, no recipe at all."""
    module, m_splits = GroupedLinear(3, 96, 64, bias=False), torch.tensor([5, 0, 37])
    quantized = GroupedRows.quantize_rows(torch.randn(50, 96), m_splits, input_quantizer(module, "mxfp8"))
    chosen = recipe("mxfp8", backward_override="dequantized") if name == "dequantized" else fresh(name)
    found = []
    for x in (quantized, quantized.dequantize()):
        reset(module)
        with autocast(enabled=name is not None, recipe=chosen):
            y = module(x, m_splits)
        y.sum().backward()
        found.append([y.detach(), module.weight.grad])
    assert_equal(*found)


def test_splits_must_be_theirs() -> None:
    module, m_splits = GroupedLinear(3, 96, 64, bias=False), torch.tensor([5, 0, 37])
    quantized = GroupedRows.quantize_rows(torch.randn(50, 96), m_splits, input_quantizer(module, "mxfp8"))
    refused(lambda: module(quantized, torch.tensor([5, 1, 36])), "are not those that the rows were quantized under")
    assert quantized_rows.rows_or_values(quantized, m_splits.int(), None, torch.float32, 1).shape == (50, 96)


def test_a_missing_copy_is_an_error() -> None:
    module, m_splits = GroupedLinear(3, 96, 64, bias=False), torch.tensor([5, 0, 37])
    quantizer = input_quantizer(module, "mxfp8").with_usage(rowwise=True, columnwise=False)
    quantized = GroupedRows.quantize_rows(torch.randn(50, 96), m_splits, quantizer)
    with autocast(recipe=recipe("mxfp8")):
        with torch.no_grad():
            module(quantized, m_splits)
        y = module(quantized, m_splits)
    refused(lambda: y.sum().backward(), "has no columnwise copy")
