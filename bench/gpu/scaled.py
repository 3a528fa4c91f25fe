"""GEMMs of quantized operands: our kernels against torch's scaled GEMM, which is the vendor's library, and bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import ScaledOperand, native
from te_models.kernels.gemm.backends import hardware

from .case import Case, Run, near
from .shapes import Shapes

E4M3 = torch.float8_e4m3fn
OURS, TORCH, BF16 = "ours", "torch scaled_mm", "bf16"
# E4M3 has a unit of 2^-4, so a product of normal numbers is about 4 % off
LIMIT = 0.06
FORMATS = {
    "per tensor": ((), ()),
    "128-block": ((1, 128), (128, 128)),
    "MXFP8": ((1, 32), (1, 32)),
}


def cases(device: torch.device, shapes: Shapes) -> Iterator[Callable[[], Case]]:
    """Yield what builds each case."""
    for shape in shapes.linear:
        for name in FORMATS:
            yield lambda n=name, s=shape: _case(device, n, *s)


def operand(x: Tensor, name: str, block: tuple[int, int] | tuple[()]) -> ScaledOperand:
    """Quantize [outer, K]."""
    if not block:
        scale = q.scale_from_amax(q.amax(x), E4M3)
        return ScaledOperand(q.quantize_per_tensor(x, scale, E4M3), 1 / scale, "per_tensor")
    kind = "e8m0" if name == "MXFP8" else "pow2"
    data, scales = q.quantize_blockwise(x, block, E4M3, kind)
    return ScaledOperand(data, scales, kind, block)


def _case(device: torch.device, name: str, tokens: int, inner: int, outer: int) -> Case:
    from te_models.kernels.gemm import triton as kernels

    x, w = (torch.randn(n, inner, device=device).bfloat16() for n in (tokens, outer))
    left, right = (operand(t, name, block) for t, block in zip((x, w), FORMATS[name], strict=True))
    y = torch.empty(tokens, outer, dtype=torch.bfloat16, device=device)
    # as a forward pass asks for it: sums that stay in the tensor cores
    sides: dict[str, Run] = {
        BF16: lambda: x @ w.t(),
        OURS: lambda: kernels.scaled_gemm(left, right, y, split_accumulation=False),
    }
    reason = native.reason_against(left, right, torch.bfloat16, hardware(device))
    if reason is None:
        sides[TORCH] = lambda: native.scaled_gemm(left, right, torch.bfloat16, None, False)
    return Case(
        f"{name} product, {tokens} x {inner} by {outer}",
        sides,
        lambda results: near(results, BF16, {OURS: LIMIT, TORCH: LIMIT}),
        flops=2.0 * tokens * inner * outer,
        over={OURS: (TORCH, BF16), TORCH: (BF16,)},
        missing={} if reason is None else {TORCH: reason},
    )
