"""What every quantizer offers to programs that make tensors by it, live ones of delayed scaling included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .tensor_types import empty_tensor, quantize_with


class TensorMaker:
    """Base of quantizers that holds what is said by the other methods."""

    rowwise: bool
    columnwise: bool
    _usages_asked: ClassVar[tuple[bool, bool] | None] = None
    """Of an object that `set_usage` was called on: (rowwise, columnwise)."""

    def _asked(self) -> Any:
        """Return what quantizes now: with the copies that `set_usage` of this object asked for last."""
        return self

    def _asked_value(self) -> Any:
        """Return the value of that."""
        return self._asked()

    @property
    def rowwise_usage(self) -> bool:
        """Whether `quantize` makes the rowwise copy: `rowwise`, or what `set_usage` said later."""
        return self.get_usages()["rowwise"]

    @property
    def columnwise_usage(self) -> bool:
        """Whether `quantize` makes the columnwise copy: `columnwise`, or what `set_usage` said later."""
        return self.get_usages()["columnwise"]

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Let `quantize`, `make_empty` and `copy` of this very object make other copies; None leaves one as it is.

        For programs of Transformer Engine. The value stays what it was: its fields, what it equals, and what layers and
        tensors that have it do with it; `with_usage` returns another value. An object that was told so is no constant
        of a graph (TypeError), but `quantize` and `copy` in a graph follow it.
        """
        before = self._usages_asked or (self.rowwise, self.columnwise)
        usages = (before[0] if rowwise is None else rowwise, before[1] if columnwise is None else columnwise)
        object.__setattr__(self, "_usages_asked", usages)

    def get_usages(self) -> dict[str, bool]:
        """Return {"rowwise": ..., "columnwise": ...}, as `quantize` makes them."""
        rowwise, columnwise = self._usages_asked or (self.rowwise, self.columnwise)
        return {"rowwise": rowwise, "columnwise": columnwise}

    def quantize(
        self, tensor: Tensor, key: Tensor | None = None, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Return a tensor [..., C] as a `QuantizedTensor` of the same logical shape.

        Leading dimensions are flattened: what is quantized is the matrix [rows, C], of a tensor without dimensions
        [1, 1]. The gradient passes unchanged, as in Transformer Engine. out: a tensor to `update_quantized` and return;
        dtype: the logical dtype, None for the tensor's own; key: see `Quantizer`.
        """
        if out is not None:
            return self.update_quantized(tensor, out, key=key)
        return quantize_with(self._asked(), tensor, key, dtype)

    def __call__(self, tensor: Tensor, key: Tensor | None = None) -> Any:
        """Return `quantize(tensor, key)`."""
        return self.quantize(tensor, key)

    def multi_quantize(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return `quantize` of each tensor."""
        return [self.quantize(tensor) for tensor in tensors]

    def calibrate(self, tensor: Tensor) -> None:
        """Do nothing: only delayed scaling has a state to record in."""

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """Return an uninitialised tensor of this logical shape [..., C] and dtype. device: None is torch's default."""
        return empty_tensor(self._asked_value(), shape, dtype, device).requires_grad_(requires_grad)

    def update_quantized(
        self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None, key: Tensor | None = None
    ) -> Any:
        """Quantize src into dst and return dst: see `Quantizer.update_quantized`."""
        raise NotImplementedError
