"""Quantizers: values that turn a high-precision tensor into a quantized one, and say what its stored fields mean.

A quantizer is a frozen dataclass: two with equal fields are the same quantizer, and the compiler may bake one into a
graph as a constant. It holds no tensors and no process groups. A change of usage is a new value (`with_usage`).

Fields are the bare tensors of a quantized tensor, by name: rowwise_data and rowwise_scale_inv serve the GEMMs that
contract the last dimension, columnwise_* those that contract the first one; a format whose blocks are square (or
that has one scale) needs no columnwise copy, its transpose has the same numbers. Every method takes leading batch
dimensions, so the members of a grouped weight [G, out, in] are quantized in one call.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand

if TYPE_CHECKING:
    from .grouped_tensor import GroupedTensor
    from .quantized_tensor import QuantizedTensor

Usage = Literal["rowwise", "columnwise"]
Fields = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Base of all quantizers. rowwise, columnwise: which copies `quantize` makes."""

    FORMAT: ClassVar[str]

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    rowwise: bool = True
    columnwise: bool = True

    def __post_init__(self) -> None:
        if self.fp8_dtype not in q.FP8_MAX:
            raise ValueError(f"fp8_dtype is {self.fp8_dtype}; allowed: {', '.join(map(str, q.FP8_MAX))}")
        if not (self.rowwise or self.columnwise):
            raise ValueError("a quantizer needs at least one usage: rowwise or columnwise")

    # --- what a format defines -------------------------------------------------------------------------------------

    @property
    def symmetric(self) -> bool:
        """Whether the transpose has the same numbers, so that one stored copy serves both usages."""
        raise NotImplementedError

    @property
    def block(self) -> tuple[int, int] | None:
        """The rowwise block (rows, columns); None for one scale per matrix."""
        raise NotImplementedError

    def _quantize(self, x: Tensor, usage: Usage) -> tuple[Tensor, Tensor]:
        """Return (data, scale_inv) of one usage, in storage layout."""
        raise NotImplementedError

    def _dequantize(self, data: Tensor, scale_inv: Tensor, usage: Usage, dtype: torch.dtype) -> Tensor:
        """Undo `_quantize`, [..., rows, columns] in the tensor's own orientation."""
        raise NotImplementedError

    def operand(self, x: Tensor, usage: Usage, dtype: torch.dtype) -> Operand:
        """Quantize x for one GEMM and return it as an operand, in x's orientation, without keeping the FP8 copy."""
        return self._operand(*self._quantize(x, usage), usage, dtype)

    def _operand(self, data: Tensor, scale_inv: Tensor, usage: Usage, dtype: torch.dtype) -> Operand:
        return Operand(self._dequantize(data, scale_inv, usage, self.gemm_dtype(dtype)), None)

    def gemm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which this format's operand values are exact, given the compute dtype."""
        return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    # --- what follows from it --------------------------------------------------------------------------------------

    def stored_usages(self) -> tuple[Usage, ...]:
        """Return the usages whose fields are stored."""
        if self.symmetric:
            return ("rowwise",)
        return tuple(u for u in ("rowwise", "columnwise") if getattr(self, u))

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the stored fields, in storage order."""
        return tuple(f"{usage}_{part}" for usage in self.stored_usages() for part in ("data", "scale_inv"))

    def _block_of(self, usage: Usage) -> tuple[int, int]:
        """Return the block of a usage in the tensor's own orientation."""
        assert self.block is not None, "one scale per matrix has no blocks"
        rows, columns = self.block
        return (rows, columns) if usage == "rowwise" else (columns, rows)

    def row_block(self, usage: Usage) -> int:
        """Return how many rows one scale spans, so that grouped rows are aligned to it; 1 for one scale per matrix."""
        return 1 if self.block is None else self._block_of(usage)[0]

    def quantize_fields(self, x: Tensor) -> Fields:
        """Quantize x: [..., rows, columns] into the stored fields."""
        fields: Fields = {}
        for usage in self.stored_usages():
            fields[f"{usage}_data"], fields[f"{usage}_scale_inv"] = self._quantize(x, usage)
        return fields

    def dequantize_fields(self, fields: Fields, dtype: torch.dtype) -> Tensor:
        """Return the values the fields stand for: [..., rows, columns]."""
        usage = self.stored_usages()[0]
        return self._dequantize(fields[f"{usage}_data"], fields[f"{usage}_scale_inv"], usage, dtype)

    def operand_of_fields(self, fields: Fields, usage: Usage, dtype: torch.dtype) -> Operand:
        """Return stored fields as the operand of a GEMM that needs `usage`; ValueError where that copy is missing."""
        stored = "rowwise" if self.symmetric else usage
        if stored not in self.stored_usages():
            raise ValueError(
                f"this {self.FORMAT} tensor has no {usage} copy, which the GEMM needs; quantize it with {usage}=True"
            )
        return self._operand(fields[f"{stored}_data"], fields[f"{stored}_scale_inv"], stored, dtype)

    def quantize(self, x: Tensor) -> QuantizedTensor:
        """Return x: [rows, columns] as a quantized tensor of the same logical shape and dtype."""
        from .quantized_tensor import TENSOR_CLASSES

        return TENSOR_CLASSES[self.FORMAT].quantize(x, self)

    __call__ = quantize

    def quantize_grouped(self, x: Tensor) -> GroupedTensor:
        """Return x: [num_gemms, rows, columns] as one grouped tensor, every member with its own scales."""
        from .grouped_tensor import GroupedTensor

        return GroupedTensor.quantize(x, self)

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Self:
        """Return a quantizer that differs only in the copies it makes."""
        return dataclasses.replace(self, rowwise=rowwise, columnwise=columnwise)

    def to_dict(self) -> dict[str, Any]:
        """Return {"format": ..., field: plain JSON value}."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["fp8_dtype"] = str(self.fp8_dtype).removeprefix("torch.")
        return {"format": self.FORMAT} | values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Quantizer:
        """Rebuild from `to_dict`; unknown formats, fields and dtypes raise ValueError by name."""
        values = dict(values)
        name = values.pop("format", None)
        if name not in QUANTIZERS:
            raise ValueError(f"quantized format is {name!r}; allowed: {', '.join(map(repr, QUANTIZERS))}")
        cls = QUANTIZERS[name]
        known = {f.name: f for f in dataclasses.fields(cls)}
        for field, value in values.items():
            if field not in known:
                raise ValueError(f"{cls.__name__} has no field {field!r}; its fields are: {', '.join(sorted(known))}")
            if field == "fp8_dtype":
                dtypes = {str(d).removeprefix("torch."): d for d in q.FP8_MAX}
                if value not in dtypes:
                    raise ValueError(f"fp8_dtype is {value!r}; allowed: {', '.join(map(repr, dtypes))}")
                values[field] = dtypes[value]
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """One float32 scale per matrix, from its own amax. Fields: data [..., R, C], scale_inv [...]."""

    FORMAT: ClassVar[str] = "float8"

    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def block(self) -> None:
        return None

    def scale(self, amax: Tensor) -> Tensor:
        """Return the factor to multiply with before the cast, for amaxes of any shape."""
        return q.scale_from_amax(amax, self.fp8_dtype, pow2=self.force_pow_2_scales, epsilon=self.amax_epsilon)

    def _quantize(self, x: Tensor, usage: Usage) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax((-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2])
        scale = self.scale(amax)
        data = q.quantize_per_tensor(x, scale[..., None, None], self.fp8_dtype)
        return data, torch.div(torch.ones_like(scale), scale)

    def _dequantize(self, data: Tensor, scale_inv: Tensor, usage: Usage, dtype: torch.dtype) -> Tensor:
        return q.dequantize_per_tensor(data, scale_inv[..., None, None], dtype)

    def _operand(self, data: Tensor, scale_inv: Tensor, usage: Usage, dtype: torch.dtype) -> Operand:
        # by way of float32: the compiler vectorises FP8 -> float32, but not FP8 -> bfloat16 (8 times slower on CPU)
        return Operand(data.float().to(self.gemm_dtype(dtype)), scale_inv)


@dataclass(frozen=True, kw_only=True)
class Float8BlockQuantizer(Quantizer):
    """Scales per 1x128 (block_scaling_dim 1) or 128x128 (2) block.

    Fields: rowwise data [..., R, C] and scale_inv [..., ceil(R/br), ceil(C/128)]; the columnwise copy of 1-D blocks is
    stored transposed: data [..., C, R], scale_inv [..., C, ceil(R/128)].
    """

    FORMAT: ClassVar[str] = "float8_block"
    BLOCK: ClassVar[int] = 128

    block_scaling_dim: int = 2
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim is {self.block_scaling_dim!r}; allowed: 1, 2")

    @property
    def symmetric(self) -> bool:
        return self.block_scaling_dim == 2

    @property
    def block(self) -> tuple[int, int]:
        return (self.BLOCK if self.symmetric else 1, self.BLOCK)

    def _quantize(self, x: Tensor, usage: Usage) -> tuple[Tensor, Tensor]:
        kind = "pow2" if self.force_pow_2_scales else "float32"
        block = self._block_of(usage)
        data, scale_inv = q.quantize_blockwise(x, block, self.fp8_dtype, kind, epsilon=self.amax_epsilon)
        # computed in x's orientation, so that reads stay contiguous
        return (data.mT, scale_inv.mT) if usage == "columnwise" else (data, scale_inv)

    def _dequantize(self, data: Tensor, scale_inv: Tensor, usage: Usage, dtype: torch.dtype) -> Tensor:
        if usage == "columnwise":
            data, scale_inv = data.mT, scale_inv.mT
        return q.dequantize_blockwise(data, scale_inv, self._block_of(usage), dtype)

    def gemm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # a float32 scale times an FP8 value is not exact in bfloat16
        return super().gemm_dtype(dtype) if self.force_pow_2_scales else torch.float32


@dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer(Quantizer):
    """Scale bytes (E8M0) per 1x32 block, or 32x32 when two_dimensional.

    Fields: data [..., R, C], scale_inv uint8 [..., R, ceil(C/32)]; columnwise data is not transposed, its scales are
    [..., ceil(R/32), C]. two_dimensional: scale_inv [..., ceil(R/32), ceil(C/32)], one copy.
    """

    FORMAT: ClassVar[str] = "mxfp8"
    BLOCK: ClassVar[int] = 32

    two_dimensional: bool = False

    @property
    def symmetric(self) -> bool:
        return self.two_dimensional

    @property
    def block(self) -> tuple[int, int]:
        return (self.BLOCK if self.two_dimensional else 1, self.BLOCK)

    def _quantize(self, x: Tensor, usage: Usage) -> tuple[Tensor, Tensor]:
        return q.quantize_blockwise(x, self._block_of(usage), self.fp8_dtype, "e8m0")

    def _dequantize(self, data: Tensor, scale_inv: Tensor, usage: Usage, dtype: torch.dtype) -> Tensor:
        return q.dequantize_blockwise(data, scale_inv, self._block_of(usage), dtype)


QUANTIZERS: dict[str, type[Quantizer]] = {
    c.FORMAT: c for c in (Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer)
}
