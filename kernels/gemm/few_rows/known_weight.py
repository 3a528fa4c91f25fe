"""A stored weight of which the questions that have one answer are asked once, and not for every token.

A token multiplies each weight, and of a small one the questions about its format take longer than the product. Nothing
of a weight is held here but how its fields lie in memory. Their addresses are read in each call, so values may change
in place, and a field that is replaced by one that lies otherwise is found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...backend import has_library
from ...compiling import unobserved
from ...custom_op import takes
from ..backends import record_choice
from ..operand import ScaledOperand
from . import library
from .integers import IntegerOperand
from .op import FEW, STORED_AS_IT_IS, choose_stored

_TAKES = takes("x: T [..., K]; data: any [N, _]; scale_inv: any; whole: any?; bias: T [N]?", T=library.DTYPES)
_Lies = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _lies(field: Tensor) -> _Lies:
    return field.shape, field.stride(), field.dtype


class KnownWeight(NamedTuple):
    """How a weight [N, K] lies in memory, whose operand's tensors are fields of it. names: of the fields that are its
    numbers, their scales and what is of the whole matrix, None where that is missing; lies: of each of these."""

    layout: library.StoredLayout
    names: tuple[str, str, str | None]
    lies: tuple[_Lies, _Lies, _Lies | None]

    @classmethod
    def of(cls, x: Tensor, weight: ScaledOperand | IntegerOperand, fields: Mapping[str, Tensor]) -> KnownWeight | None:
        """Return how the weight of a product lies that has been computed as it is stored; None where it was not, and
        where the operand's tensors are not the fields themselves. x: [M, K]; fields: by name."""
        if weight.data.dim() != 2 or choose_stored(x, weight) is not STORED_AS_IT_IS:
            return None
        whole = weight.zero_point if isinstance(weight, IntegerOperand) else weight.amax
        names = [_name(part, fields) for part in (weight.data, weight.scale_inv)]
        name_of_whole = None if whole is None else _name(whole, fields)
        if None in names or (whole is not None and name_of_whole is None):
            return None
        lies = (_lies(weight.data), _lies(weight.scale_inv), None if whole is None else _lies(whole))
        return cls(library.stored_layout(weight, x.dtype), (names[0], names[1], name_of_whole), lies)  # type: ignore[arg-type]

    def multiply(self, x: Tensor, fields: Mapping[str, object], bias: Tensor | None) -> Tensor | None:
        """Return `x @ weight^T + bias` [M, N] of x: [..., K] as `stored_weight_linear` does, with the same bits; None
        where that has to be asked: a gradient may be wanted, something looks on, another backend is set, or x, bias or
        a field are not as they were."""
        layout, (data_name, scale_name, whole_name) = self.layout, self.names
        data, scale_inv = fields.get(data_name), fields.get(scale_name)
        whole = None if whole_name is None else fields.get(whole_name)
        if torch.is_grad_enabled() or x.dtype is not layout.dtype or not unobserved():
            return None
        if _TAKES.misfit_on_cpu(x, data, scale_inv, whole, bias):
            return None
        assert isinstance(data, Tensor) and isinstance(scale_inv, Tensor), "they fit"
        inner = layout.inner
        if x.shape[-1] != inner or not 0 < x.numel() <= FEW * inner:
            return None
        lies = (_lies(data), _lies(scale_inv), None if whole is None else _lies(whole))  # type: ignore[arg-type]
        if lies != self.lies or not has_library(library.STORED, layout.form, layout.dtype):
            return None
        record_choice(STORED_AS_IT_IS, strict=False)
        return library.multiply_stored(layout, x.reshape(-1, inner), data, scale_inv, whole, bias)  # type: ignore[arg-type]


def _name(part: Tensor, fields: Mapping[str, Tensor]) -> str | None:
    """Return the name of the field that a tensor is, whatever object it is."""
    for name, field in fields.items():
        if part.data_ptr() == field.data_ptr() and _lies(part) == _lies(field):
            return name
    return None
