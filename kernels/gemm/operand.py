"""A quantized side of a GEMM: the stored numbers and their scales, as views with the contracted dimension last.

Orientation is in the strides: whatever way a format stores a copy, its view here is [..., outer, K], so that every
GEMM is `left @ right^T`. fprop takes x and w as they are stored rowwise; dgrad and wgrad take columnwise copies.
Per-tensor, 128-block and NVFP4 formats store them transposed already; MXFP8 does not (`.mT` turns a view).

    kind          data                              scale_inv, one per block                      block
    "per_tensor"  FP8 [..., M, K]                   float32 [...]                                 None
    "float32"     FP8 [..., M, K]                   float32 [..., ceil(M/rows), ceil(K/128)]      (1 or 128, 128)
    "pow2"        as "float32", and every scale is a power of two
    "e8m0"        FP8 [..., M, K]                   uint8 exponents, M/rows and K/32 likewise     (1 or 32, 32)
    "nvfp4"       uint8 [..., M, K/2], two values   E4M3 [..., M, K/16]; amax float32 [...]       (1, 16)
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from te_models.suggestions import check_choice

from .. import quantize as q
from .reference import Operand

Kind = Literal["per_tensor", "float32", "pow2", "e8m0", "nvfp4"]
_SCALE_DTYPE = {"per_tensor": torch.float32, "float32": torch.float32, "pow2": torch.float32, "e8m0": torch.uint8}
_SCALE_DTYPE["nvfp4"] = torch.float8_e4m3fn


class ScaledOperand(NamedTuple):
    """Quantized values of one side, [..., outer, K]; leading dimensions are the members of a grouped weight."""

    data: Tensor
    scale_inv: Tensor
    kind: Kind
    block: tuple[int, int] | None = None
    amax: Tensor | None = None

    @property
    def outer(self) -> int:
        """The dimension that is not contracted: M of the left side, N of the right one."""
        return self.data.shape[-2]

    @property
    def inner(self) -> int:
        """The contracted dimension K."""
        return self.data.shape[-1] * (2 if self.kind == "nvfp4" else 1)

    @property
    def mT(self) -> ScaledOperand:  # the name of torch.Tensor.mT
        """The same numbers with the other dimension contracted, no copy. Packed ones have no such view: ValueError."""
        if self.kind == "nvfp4":
            raise ValueError("packed NVFP4 values cannot be transposed; quantize the columnwise copy instead")
        scale_inv = self.scale_inv if self.block is None else self.scale_inv.mT
        return ScaledOperand(self.data.mT, scale_inv, self.kind, self.block and (self.block[1], self.block[0]))

    def member(self, g: int) -> ScaledOperand:
        """Return one matrix of a grouped operand [G, outer, K]."""

        def own(field: Tensor) -> Tensor:
            return field.reshape(()) if field.numel() == 1 else field[g]  # one may be of all matrices

        scale_inv = own(self.scale_inv) if self.block is None else self.scale_inv[g]
        return ScaledOperand(
            self.data[g], scale_inv, self.kind, self.block, None if self.amax is None else own(self.amax)
        )

    @property
    def exact_in_bfloat16(self) -> bool:
        """Whether value * block scale fits bfloat16; per-tensor scales stay out of the values."""
        return self.kind != "float32"

    def dequantized(self, dtype: torch.dtype) -> Operand:
        """Return the values in `dtype` and the factor left for the epilogue."""
        if self.kind == "per_tensor":
            # by way of float32: the compiler vectorises FP8 -> float32, but not FP8 -> bfloat16
            return Operand(q.fp8_to_float(self.data).to(dtype), self.scale_inv)
        if self.kind == "nvfp4":
            assert self.amax is not None
            values = q.decode_blocks(self.data, self.scale_inv, self.inner).to(dtype)
            return Operand(values, q.global_decode(self.amax))
        assert self.block is not None
        return Operand(q.dequantize_blockwise(self.data, self.scale_inv, self.block, dtype), None)

    def fits(self) -> bool:
        """Whether the fields fit each other."""
        try:
            self.check("weight")
        except ValueError:
            return False
        return True

    def check(self, name: str, groups: int | None = None) -> None:
        """Raise ValueError where fields do not fit each other. groups: rows [T, K] have one scale for each of these."""
        check_choice(f"{name}.kind", self.kind, get_args(Kind))
        if self.scale_inv.dtype != _SCALE_DTYPE[self.kind]:
            raise ValueError(f"{name}.scale_inv is {self.scale_inv.dtype}; {self.kind} has {_SCALE_DTYPE[self.kind]}")
        allowed = (torch.uint8,) if self.kind == "nvfp4" else tuple(q.FP8_MAX)
        if self.data.dtype not in allowed:
            raise ValueError(f"{name}.data is {self.data.dtype}; {self.kind} has {' or '.join(map(str, allowed))}")
        if (self.block is None) != (self.kind == "per_tensor"):
            raise ValueError(f"{name}.block is {self.block}; only a per-tensor operand has none")
        if (self.amax is None) != (self.kind != "nvfp4"):
            raise ValueError(
                f"{name}.amax is {'missing' if self.amax is None else 'given'}, but its kind is {self.kind}"
            )
        if self.kind in ("per_tensor", "nvfp4"):
            whole = self.scale_inv if self.amax is None else self.amax
            members = self.data.shape[:-2] if groups is None else (groups,)
            if whole.shape != members and not (groups is None and whole.numel() == 1):
                field = "scale_inv" if self.amax is None else "amax"
                raise ValueError(
                    f"{name}.{field} is {tuple(whole.shape)}, but there is one per matrix: {tuple(members)}"
                )
        if self.block is None:
            return
        rows, columns = self.block
        expected = (*self.data.shape[:-2], -(-self.outer // rows), -(-self.inner // columns))
        if tuple(self.scale_inv.shape) != expected:
            raise ValueError(f"{name}.scale_inv is {tuple(self.scale_inv.shape)}, but its blocks are {expected}")


def emulation_dtype(left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which both sides' values are exact, float32 where the output wants its precision."""
    exact = left.exact_in_bfloat16 and right.exact_in_bfloat16
    return torch.bfloat16 if exact and out_dtype == torch.bfloat16 else torch.float32


def k_contiguous(data: Tensor) -> Tensor:
    """Return data [..., outer, K] itself where K is contiguous and rows do not overlap, else such a copy of it.

    On CUDA the copy is one Triton kernel that reads and writes whole lines. torch's own copy of a transposed view of
    bytes is coalesced on one side only; it serves elsewhere.
    """
    if data.stride(-1) == 1 and data.stride(-2) >= data.shape[-1]:
        return data
    if not data.is_cuda:
        return data.contiguous()
    from . import triton as kernels

    out = torch.empty_like(data, memory_format=torch.contiguous_format)
    kernels.copy_transposed(data.view(torch.uint8), out.view(torch.uint8))
    return out
