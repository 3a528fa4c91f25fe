"""The dtype names of the safetensors format, their torch dtypes and their widths in bits; casts that overflow.

A conversion to float16 that turns a finite number into an infinite one is refused where it writes, a buffer at a time:
float16 reaches 65504, every other float 3e38, and a maximum costs little beside the conversion itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

from te_models.lazy import torch

from .errors import CheckpointError

_TABLE: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
}
"""Name: torch's name, width."""
_NAMES = {attribute: name for name, (attribute, _) in _TABLE.items()}

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes a high-precision weight may have."""


def bit_width(name: str) -> int | None:
    """Return the width of one element in bits, or None for a dtype that this version does not know."""
    return _TABLE[name][1] if name in _TABLE else None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name."""
    return getattr(torch, _TABLE[name][0])


def torch_dtype_name(name: str) -> str:
    """Return torch's name, such as "bfloat16", of a safetensors dtype name."""
    return _TABLE[name][0]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype."""
    name = _NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise CheckpointError(f"tensors of dtype {dtype} cannot be stored in safetensors files")
    return name


def joint_dtype(names: Iterable[str]) -> str:
    """Return the name of the dtype that holds the numbers of all these: rounded to another, different ones could be the
    same."""
    distinct = sorted(set(names))
    if len(distinct) == 1:
        return distinct[0]
    return dtype_name(functools.reduce(torch.promote_types, map(torch_dtype, distinct)))


def with_most_bytes(sizes: Iterable[tuple[str, int]], default: str) -> str:
    """Return the dtype name that most bytes of tensors have, given as (dtype name, bytes); `default` without any."""
    total: Counter[str] = Counter()
    for name, nbytes in sizes:
        total[name] += nbytes
    return max(total, key=total.__getitem__, default=default)


def as_torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype given as such or by name ("bfloat16"); one that weights cannot have raises CheckpointError."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or _NAMES.get(str(found).removeprefix("torch.")) not in FLOATS:
        raise CheckpointError(f"weights cannot be converted to {dtype}; choose float64, float32, float16 or bfloat16")
    return found


def check_converted(found: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Raise CheckpointError naming the tensor `name` if `found`, made of `values`, is infinite where these are not."""
    if found.dtype != torch.float16 or values.dtype == torch.float16 or not found.isinf().any():
        return
    lost = values[found.isinf() & values.isfinite()]
    if lost.numel():
        raise CheckpointError(
            f"{name} has the value {float(lost[0]):.6g}, which float16 cannot hold (at most 65504); choose bfloat16 or "
            "float32"
        )


def check_decoded(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return the values of a quantized weight; raise CheckpointError naming it if float16 is too narrow for them."""
    if values.dtype == torch.float16 and values.isinf().any():
        raise CheckpointError(f"{name} has values that float16 cannot hold (at most 65504); choose bfloat16 or float32")
    return values
