"""What the stored fields of a quantized value will be, from its shape alone: sizes from the declared layouts.

Pure arithmetic on sizes, so that it costs nothing where the compiler asks for it with symbolic ones. What the layouts
do not declare, dtypes and which of two dimensions is the inner one, is read off a small example, once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from te_models.kernels.quantize.grouped import padded_length
from te_models.kernels.registry import Output

from .field_schema import FieldLayout, field_layouts
from .grouped_rows import quantize_rows, row_alignment
from .quantizer import Quantizer

# larger than any block in both dimensions, so that no field has a dimension of size 1
_ROWS, _COLUMNS, _GROUPS = 160, 288, 2


def field_outputs(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: torch.device, groups: int | None = None
) -> list[Output]:
    """Describe the fields, in storage order, of a matrix [..., rows, columns], or with groups of rows [T, columns].

    dtype: of the values that are quantized. Sizes may be symbolic.
    """
    traits = _traits(quantizer, dtype, device, groups is not None)
    found = []
    for layout, (own, transposed) in zip(field_layouts(quantizer), traits, strict=True):
        found.append(Output(_size(quantizer, layout, shape, groups), own, device, transposed))
    return found


def _size(quantizer: Quantizer, layout: FieldLayout, shape: Sequence[int], groups: int | None) -> tuple[int, ...]:
    *batch, rows, columns = shape
    if groups is not None:
        rows = padded_length(rows, groups, row_alignment(quantizer, layout.usage))
        batch = [groups] if layout.block is None else []
    if layout.block is None:
        return tuple(batch)
    entries = [layout.entries(0, size, dim)[1] for size, dim in ((rows, -2), (columns, -1))]
    return (*batch, *(reversed(entries) if layout.transposed else entries))


@functools.lru_cache(maxsize=1024)
def _traits(
    quantizer: Quantizer, dtype: torch.dtype, device: torch.device, grouped: bool
) -> tuple[tuple[torch.dtype, bool], ...]:
    """Return dtype and whether the last two dimensions lie swapped, of each field, as the device's kernels make it."""
    # whatever traces this asks for an answer and is not to see how it was found
    with _disable_current_modes(), FakeTensorMode():
        key = torch.empty(2, dtype=torch.int64, device=device)
        if grouped:
            m_splits = torch.empty(_GROUPS, dtype=torch.int64, device=device)
            x = torch.empty(_ROWS, _COLUMNS, dtype=dtype, device=device)
            fields = quantize_rows(quantizer, x, m_splits, key)
        else:
            x = torch.empty(_GROUPS, _ROWS, _COLUMNS, dtype=dtype, device=device)
            fields = quantizer.quantize_fields(x, key)
        found = [fields[name] for name in quantizer.field_names()]
        return tuple((f.dtype, f.dim() > 1 and f.stride(-2) < f.stride(-1)) for f in found)
