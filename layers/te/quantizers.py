"""What programs of Transformer Engine ask of quantizers and quantized tensors: arguments of constructors, and methods.

A quantizer is a value that the compiler knows by its class, so that there is one class of each format and none on the
porch: what is here is added to the classes of the core.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.suggestions import shown

from ..quantizer import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.encoding import NumberFormat
from ..quantizer.tensor_types import quantize_with, type_of
from ..tensor.storage import QuantizedFields
from .arguments import DType, add_members, takes_also, takes_at_default, takes_without_effect

AMAX_REDUCTION: dict[str, Any] = {"with_amax_reduction": False, "amax_reduction_group": None}
"""Here the parts of a matrix share an amax under FSDP2, see `share_scales`."""

_current = takes_at_default(**AMAX_REDUCTION)(Float8CurrentScalingQuantizer.__init__)
Float8CurrentScalingQuantizer.__init__ = takes_without_effect("device", position=2)(_current)  # type: ignore[method-assign]

_mxfp8 = takes_also(with_2d_quantization="two_dimensional")(MXFP8Quantizer.__init__)
MXFP8Quantizer.__init__ = _mxfp8  # type: ignore[method-assign]

_nvfp4 = takes_at_default(**AMAX_REDUCTION, fp4_dtype=DType.kFloat4E2M1)(NVFP4Quantizer.__init__)
# an amax is always taken of the transformed matrix
NVFP4Quantizer.__init__ = takes_without_effect("with_post_rht_amax")(_nvfp4)  # type: ignore[method-assign]

_live = Float8Quantizer.__init__


def _init_live(
    self: Any,
    scale: Tensor,
    amax: Tensor | None,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> None:
    _live(self, scale, amax, fp8_dtype)
    if not (rowwise and columnwise):
        self.set_usage(rowwise=rowwise, columnwise=columnwise)


Float8Quantizer.__init__ = _init_live  # type: ignore[method-assign]


class _OfEveryQuantizer:
    """Methods of values and of live quantizers of delayed scaling."""

    rowwise: bool
    columnwise: bool
    _usages_asked: tuple[bool, bool] | None = None
    """Of an object that `set_usage` was called on: (rowwise, columnwise)."""

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

        The value stays what it was: its fields, what it equals, and what layers and tensors that have it do with it;
        `with_usage` returns another value. An object that was told so is no constant of a graph (TypeError), but
        `quantize` and `copy` in a graph follow it.
        """
        before = self._usages_asked or (self.rowwise, self.columnwise)
        usages = (before[0] if rowwise is None else rowwise, before[1] if columnwise is None else columnwise)
        object.__setattr__(self, "_usages_asked", usages)

    def get_usages(self) -> dict[str, bool]:
        """Return {"rowwise": ..., "columnwise": ...}, as `quantize` makes them."""
        rowwise, columnwise = self._usages_asked or (self.rowwise, self.columnwise)
        return {"rowwise": rowwise, "columnwise": columnwise}

    def quantize(
        self: Any, tensor: Tensor, key: Tensor | None = None, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Return a tensor [..., C] as a `QuantizedTensor` of the same logical shape.

        Leading dimensions are flattened: what is quantized is the matrix [rows, C], of a tensor without dimensions
        [1, 1]. The gradient passes unchanged. out: a tensor to `update_quantized` and return; dtype: the logical dtype,
        None for the tensor's own; key: see `Quantizer`.
        """
        if out is not None:
            return self.update_quantized(tensor, out, key=key)
        found = quantize_with(self._asked(), tensor, key)
        return found if dtype is None or dtype == found.dtype else found.to(dtype)

    def multi_quantize(self: Any, tensors: Sequence[Tensor]) -> list[Any]:
        """Return `quantize` of each tensor."""
        return [self.quantize(tensor) for tensor in tensors]

    def make_empty(
        self: Any,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """Return an uninitialised tensor of this logical shape [..., C], or [] for one number, and dtype. device: None
        is torch's default."""
        quantizer, size = self._asked_value(), torch.Size(shape)
        cls, matrix = type_of(quantizer), (size[:-1].numel(), size[-1]) if size else (1, 1)
        flat = cls.empty(matrix, quantizer, dtype, torch.get_default_device() if device is None else device)
        found = flat if len(size) == cls.RANK else flat.wrap(flat.fields, shape=size, matrix_shape=flat.shape)
        return found.requires_grad_(requires_grad)


class _OfValues:
    """Methods of quantizers without a state."""

    def _asked(self: Any) -> Any:
        asked = self._usages_asked
        return self if asked is None else self.with_usage(rowwise=asked[0], columnwise=asked[1])

    def _asked_value(self: Any) -> Any:
        return self._asked()

    def copy(self: Any) -> Any:
        """Return an equal quantizer that makes the copies that this object was told to make last."""
        return self.with_usage(**self.get_usages())

    def calibrate(self, tensor: Tensor) -> None:
        """Do nothing: only delayed scaling has a state to record in."""

    def update_quantized(
        self: Any, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None, key: Tensor | None = None
    ) -> Any:
        """Quantize src into dst, a tensor of its shape that this quantizer could have made, and return dst.

        noop_flag: a scalar tensor; where it is nonzero dst stays as it is, decided on the device. key: see `Quantizer`.
        ValueError for another format or other options, and for another shape.
        """
        if not isinstance(dst, type_of(self)) or not self.same_numbers(dst.quantizer):
            raise ValueError(f"{self} cannot update {shown(dst)}; allowed: a tensor that such a quantizer made")
        return dst.quantize_(src.to(dst.device), noop=noop_flag, key=key)


class _OfLiveQuantizers:
    """The same of `Float8Quantizer`."""

    def _asked(self) -> Any:
        return self

    def _asked_value(self: Any) -> Any:
        return self.value

    def copy(self: Any) -> Any:
        """Return another quantizer with the same tensors."""
        new: Any = Float8Quantizer(self.scale, self.amax, self.fp8_dtype)
        new.set_usage(**self.get_usages())
        return new

    def calibrate(self: Any, tensor: Tensor) -> None:
        """Record the amax of a tensor of any shape, as if it was quantized."""
        self.record(q.amax(tensor.detach().reshape(1, -1)))

    @torch.no_grad()
    def update_quantized(
        self: Any, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None, key: Tensor | None = None
    ) -> Any:
        """Quantize src into dst with this scale, recording its amax, and return dst. ValueError for another format, and
        for another shape."""
        if not isinstance(dst, type_of(self)) or dst.quantizer.fp8_dtype != self.fp8_dtype:
            raise ValueError(
                f"a Float8Quantizer of {self.fp8_dtype} cannot update {shown(dst)}; allowed: such a Float8Tensor"
            )
        if src.shape != dst.shape:
            raise ValueError(f"cannot quantize shape {tuple(src.shape)} into a tensor of shape {tuple(dst.shape)}")
        return dst.overwrite(self.quantize_fields(src.to(dst.device).reshape(dst.matrix_shape)), noop=noop_flag)


class _OfMXFP8:
    @property
    def with_2d_quantization(self: Any) -> bool:
        """`two_dimensional`."""
        return self.two_dimensional


class _OfTensors:
    """Methods of quantized tensors and storages."""

    def update_usage(self: Any, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Any:
        """Drop or create the copies for the two GEMM usages, in place; None leaves a usage as it is.

        This tensor gets another quantizer value; the one it was made with does not change, because others may share it.
        ValueError where a copy is asked for that the stored numbers do not determine.
        """
        quantizer = self.quantizer.with_usage(
            rowwise=self.quantizer.rowwise if rowwise is None else rowwise,
            columnwise=self.quantizer.columnwise if columnwise is None else columnwise,
        )
        before = self.fields
        missing = [name for name in quantizer.field_names() if name not in before]
        if missing:
            usage = missing[0].partition("_")[0]
            raise ValueError(
                f"this {quantizer.FORMAT} tensor has no {usage} copy, and its other copy does not determine one: their "
                f"blocks run along different dimensions. Quantize the original values with {usage}=True instead"
            )
        for name in before:
            delattr(self, name)
        self._adopt(before, quantizer, self.matrix_shape)
        return self


add_members(NumberFormat, _OfEveryQuantizer)
add_members(Quantizer, _OfValues)
add_members(Float8Quantizer, _OfLiveQuantizers)
add_members(MXFP8Quantizer, _OfMXFP8)
add_members(QuantizedFields, _OfTensors)
