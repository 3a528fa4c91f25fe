"""Expert GEMMs: bf16 against torch's grouped GEMM, FP8 128-blocks against the better of the two, and whole layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from te_models import layers
from te_models.kernels import quantize as q
from te_models.kernels.gemm import ScaledOperand
from te_models.kernels.grouped_gemm import (
    ROW_ALIGNMENT,
    grouped_gemm,
    grouped_gemm_wgrad,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
)

from .case import Case, Run, near
from .shapes import Grouped, Shapes

E4M3 = torch.float8_e4m3fn
BF16, TORCH, FP8 = "bf16", "torch._grouped_mm", "FP8 128-block"
TARGET = 1.3
# two bf16 results of float32 sums; E4M3 has a unit of 2^-4, so a normal product is about 4 % off
LIMITS = {BF16: 2.0**-7, FP8: 0.06}
_torch_grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def ragged(rows: int, groups: int, device: torch.device) -> Tensor:
    """Return seeded splits of `rows` rows: of very different size, the second one empty where there are three."""
    weights = torch.rand(groups, generator=torch.Generator().manual_seed(0)) + 0.1
    if groups > 2:
        weights[1] = 0
    ends = (weights.cumsum(0) / weights.sum() * rows).round().long()
    ends[-1] = rows
    return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)).to(device)


def cases(device: torch.device, shapes: Shapes) -> Iterator[Callable[[], Case]]:
    """Yield what builds each case."""
    for shape in shapes.grouped:
        yield from (lambda s=shape, build=build: build(device, s) for build in (_fprop, _dgrad, _wgrad, _layer))


def _tensors(device: torch.device, shape: Grouped) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x [T, K], dy [T, N], w [G, N, K], splits [G] and their ends, int32."""
    x = torch.randn(shape.rows, shape.inner, device=device).bfloat16()
    dy = torch.randn(shape.rows, shape.outer, device=device).bfloat16()
    w = (torch.randn(shape.groups, shape.outer, shape.inner, device=device) * 0.02).bfloat16()
    splits = ragged(shape.rows, shape.groups, device)
    return x, dy, w, splits, splits.cumsum(0).to(torch.int32)


def _case(shape: Grouped, what: str, ours: Run, peer: Run, fp8: Run, gemms: int = 1) -> Case:
    return Case(
        f"{what}, {shape.rows} rows, {shape.name}",
        {BF16: ours, TORCH: peer, FP8: fp8},
        lambda results: near(results, TORCH, LIMITS),
        flops=2.0 * gemms * shape.rows * shape.outer * shape.inner,
        over={BF16: (TORCH,), FP8: (BF16, TORCH)},
        targets={FP8: TARGET},
    )


def _rows(x: Tensor) -> ScaledOperand:
    data, scales = q.quantize_blockwise(x, (1, 128), E4M3, "pow2")
    return ScaledOperand(data, scales, "pow2", (1, 128))


def _weight(w: Tensor, *, columnwise: bool) -> ScaledOperand:
    """Return the copy that contracts K, or the one that contracts N."""
    data, scales, col_data, col_scales = q.quantize_blockwise_both(w, (128, 128), E4M3, "pow2")
    row = ScaledOperand(data, scales, "pow2", (128, 128))
    return ScaledOperand(col_data, col_scales, "pow2", (128, 128)).mT if columnwise else row


def _columns(x: Tensor, splits: Tensor) -> ScaledOperand:
    """Return the copy [C, P] that contracts the rows, every group padded to a multiple of 128."""
    found = q.quantize_grouped_blockwise(x, splits, (1, 128), E4M3, "pow2", rowwise=False)
    return ScaledOperand(found[0], found[1], "pow2", (128, 1)).mT


def _fprop(device: torch.device, shape: Grouped) -> Case:
    x, _, w, splits, ends = _tensors(device, shape)
    left, right = _rows(x), _weight(w, columnwise=False)
    return _case(
        shape,
        "fprop",
        lambda: grouped_gemm(x, w, splits),
        lambda: _torch_grouped_mm(x, w.mT, offs=ends),
        lambda: scaled_grouped_gemm(left, right, splits, torch.bfloat16),
    )


def _dgrad(device: torch.device, shape: Grouped) -> Case:
    _, dy, w, splits, ends = _tensors(device, shape)
    left, right = _rows(dy), _weight(w, columnwise=True)
    return _case(
        shape,
        "dgrad",
        lambda: grouped_gemm(dy, w, splits, False),
        lambda: _torch_grouped_mm(dy, w, offs=ends),
        lambda: scaled_grouped_gemm(left, right, splits, torch.bfloat16),
    )


def _wgrad(device: torch.device, shape: Grouped) -> Case:
    x, dy, _, splits, ends = _tensors(device, shape)
    left, right = _columns(dy, splits), _columns(x, splits)
    align = ROW_ALIGNMENT["pow2"]
    padded = (splits + align - 1) // align * align
    return _case(
        shape,
        "wgrad",
        lambda: grouped_gemm_wgrad(dy, x, splits),
        lambda: _torch_grouped_mm(dy.t(), x, offs=ends),
        lambda: scaled_grouped_gemm_wgrad(left, right, padded, torch.bfloat16),
    )


def _layer(device: torch.device, shape: Grouped) -> Case:
    """Forward and backward of a GroupedLinear, the quantizations among them."""
    x, dy, w, splits, ends = _tensors(device, shape)
    module = layers.GroupedLinear(
        shape.groups,
        shape.inner,
        shape.outer,
        bias=False,
        single_grouped_weight=True,
        params_dtype=torch.bfloat16,
        device=device,
    )
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.copy_(w)
    x.requires_grad_()

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x, splits), (x, weight), dy)

    def fp8() -> tuple[Tensor, ...]:
        with layers.autocast(recipe=layers.Float8BlockScaling()):
            y = module(x, splits)
        return torch.autograd.grad(y, (x, weight), dy)

    def peer() -> tuple[Tensor, ...]:
        return torch.autograd.grad(_torch_grouped_mm(x, weight.mT, offs=ends), (x, weight), dy)

    return _case(shape, "layer forward + backward", ours, peer, fp8, gemms=3)
