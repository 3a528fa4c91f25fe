"""One definition and one quantizer make a format (docs/contributing/format.md), eager and compiled, without more."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.gemm import Operand
from te_models.layers import CustomRecipe, GroupedLinear, Linear, Quantizer, autocast
from te_models.layers.quantizer.encoding import Encoding, Fields, RowsByGroup, Scale, Use, Uses
from te_models.layers.quantizer.value import derived, value_class
from te_models.layers.tensor.grouped_tensor import GroupedRows

BLOCK, LARGEST = 16, 31


def quantize_six_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: six-bit integers [R, C] and a power of two for each 16 of a row, float32 [R, ceil(C / 16)]."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(torch.where(amax > 0, amax, 1.0) / LARGEST)))
    codes = (blocks / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return codes.flatten(-2)[..., : x.shape[-1]], scale.squeeze(-1)


def dequantize_six_bits(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]


@value_class
@dataclass(frozen=True, kw_only=True)
class SixBitQuantizer(Quantizer):
    """Fields: data int8 [..., R, C], scale_inv [..., R, ceil(C/16)]; columnwise ones of the transpose."""

    FORMAT: ClassVar[str] = "six_bits"
    BLOCK_SCALES_ONLY: ClassVar[bool] = True

    @derived
    def block(self) -> tuple[int, int]:
        return (1, BLOCK)

    def largest(self) -> float:
        return LARGEST

    def part_dtype(self, part: str) -> torch.dtype:
        return torch.int8 if part == "data" else torch.float32

    def encode(self, x: Tensor, scale: Scale, uses: Uses, rows: RowsByGroup | None = None) -> Encoding:
        copies = [quantize_six_bits(x if usage == "rowwise" else x.mT) for usage in uses.stored]
        return Encoding(self.named([part for copy in copies for part in copy], uses.stored))

    def operand(self, fields: Fields, use: Use) -> Operand:
        values = dequantize_six_bits(*self.parts_of(fields, use.usage)).to(self.gemm_dtype(use.dtype))
        return Operand(values if use.usage == "rowwise" else values.mT, None)


RECIPE = CustomRecipe(qfactory=lambda role: SixBitQuantizer())
SPLITS = torch.tensor([5, 0, 20, 7])


def layer_of(kind: str) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if kind == "linear":
        return Linear(48, 64), ()
    return GroupedLinear(4, 48, 64, bias=False), (SPLITS,)


def step(layer: torch.nn.Module, run, x: Tensor, dy: Tensor, *splits: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with autocast(recipe=RECIPE):
        y = run(x, *splits)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def rounded(x: Tensor, dim: int) -> Tensor:
    """What the GEMM that contracts this dimension sees."""
    return dequantize_six_bits(*quantize_six_bits(x)) if dim == 1 else rounded(x.mT, 1).mT


def expected(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    return [rounded(x, 1) @ rounded(w, 1).mT, rounded(dy, 1) @ rounded(w, 0), rounded(dy, 0).mT @ rounded(x, 0)]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):  # float32 sums of at most 64 products, in another order
        torch.testing.assert_close(a, b, rtol=0, atol=64 * 2.0**-24 * float(b.abs().max().clamp(min=1)) * 8)


def test_a_dense_layer_computes_with_it() -> None:
    layer, _ = layer_of("linear")
    x, dy = torch.randn(32, 48), torch.randn(32, 64)
    close(step(layer, layer, x, dy), expected(x, layer.weight.detach(), dy))


def test_a_grouped_layer_quantizes_each_group_by_itself() -> None:
    layer, _ = layer_of("grouped")
    x, dy = torch.randn(32, 48), torch.randn(32, 64)
    parts = zip(x.split(SPLITS.tolist()), layer.weight.detach(), dy.split(SPLITS.tolist()), strict=True)
    y, dx, dw = zip(*[expected(*part) for part in parts], strict=True)
    close(step(layer, layer, x, dy, SPLITS), [torch.cat(y), torch.cat(dx), torch.stack(dw)])


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_compiled_it_has_the_same_numbers(kind: str) -> None:
    layer, splits = layer_of(kind)
    x, dy = torch.randn(32, 48), torch.randn(32, 64)
    eager = step(layer, layer, x, dy, *splits)
    close(step(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), x, dy, *splits), eager)


def test_tensors_of_it_are_stored_and_read_back() -> None:
    x = torch.randn(32, 48)
    tensor = SixBitQuantizer().quantize(x)
    assert torch.equal(tensor.dequantize(), rounded(x, 1)) and tensor.rowwise_data.dtype == torch.int8
    assert tensor.columnwise_data.shape == (48, 32)
    assert torch.equal(GroupedRows.quantize_rows(x, SPLITS, SixBitQuantizer()).dequantize(), rounded(x, 1))
    found = SixBitQuantizer().statistics(x)
    assert found["amax"] == x.abs().max() and found["saturation"] == 0
