"""What passes between the operations of a fused group: arguments, results, and what is left for the backward pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quantizer.state import AnyQuantizer
from ...tensor.formats import TENSOR_CLASSES
from ...tensor.quantized_tensor import QuantizedTensor
from ...tensor.storage import QuantizedStorage, storage_of


class QuantizedRows(NamedTuple):
    """An input [..., C] that comes quantized, as a matrix. shape: the logical one."""

    storage: QuantizedStorage
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        """The logical dtype."""
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        """The device of the fields."""
        return self.storage.device

    def dequantize(self) -> Tensor:
        """Return the values, in the logical shape and dtype."""
        return self.storage.dequantize().view(self.shape)


Input = Tensor | QuantizedRows


def as_input(x: Tensor) -> Input:
    """Return what a group is given, a quantized matrix as its bare fields; of rows by group and of stacks, whose fields
    lie otherwise, the values."""
    if not isinstance(x, QuantizedTensor):
        return x
    x.require_matrix("be the input of an operation")
    if type(x) is not TENSOR_CLASSES.get(x.quantizer.FORMAT, QuantizedTensor):
        return x.dequantize()
    storage = storage_of(x.fields, x.quantizer, x.shape, x.dtype)
    return QuantizedRows(storage, x.shape)


def as_result(x: Input) -> Tensor:
    """Return the result of a group for its caller: quantized rows as a quantized tensor. ValueError unless a matrix."""
    if isinstance(x, Tensor):
        return x
    if len(x.shape) != 2:
        raise ValueError(f"a quantized output of shape {tuple(x.shape)} is no matrix; allowed: [rows, columns]")
    storage = x.storage
    return TENSOR_CLASSES.get(storage.quantizer.FORMAT, QuantizedTensor)(
        storage.fields, storage.quantizer, x.shape, storage.dtype
    )


class OperationArguments(NamedTuple):
    """What an operation reads besides its input, looked up before the group runs.

    parameters: tensors whose gradients it returns, in this order; tensors: others, such as live state; constants: a
    value without tensors that need gradients.
    """

    parameters: tuple[Tensor | None, ...] = ()
    tensors: tuple[Tensor | None, ...] = ()
    constants: Any = None


class Needs(NamedTuple):
    """Which gradients are wanted: of the input, of each parameter and of each extra input."""

    input: bool
    parameters: tuple[bool, ...] = ()
    extra_inputs: tuple[bool, ...] = ()

    def any(self) -> bool:
        """Whether the operation has a backward pass at all."""
        return self.input or any(self.parameters) or any(self.extra_inputs)


class OperationCall(NamedTuple):
    """One run of an operation's forward pass. next_input: the quantizer whose data the next operation takes, where it
    takes quantized data. parameters, tensors: as in `OperationArguments`."""

    parameters: tuple[Any, ...]
    tensors: tuple[Any, ...]
    extra_inputs: tuple[Tensor, ...]
    constants: Any
    needs: Needs
    next_input: AnyQuantizer | None = None


class Computed(NamedTuple):
    """What a forward pass returns. saved: tensors for `op_forward_save_ctx`; notes: constants for it."""

    output: Input
    saved: tuple[Tensor | None, ...] = ()
    extra_outputs: tuple[Tensor, ...] = ()
    notes: Any = None


class Gradients(NamedTuple):
    """What a backward pass returns."""

    input: Tensor | None
    parameters: tuple[Tensor | None, ...] = ()
    extra_inputs: tuple[Tensor | None, ...] = ()


class OperationContext:
    """What the forward pass of one operation leaves for its backward pass: tensors and constants, nothing else.

    saved: tensors, freed with the graph; live: tensors that the backward pass writes to; constants: any value.
    """

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.saved: tuple[Any, ...] = ()
        self.live: tuple[Any, ...] = ()
        self.constants: Any = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors until the backward pass."""
        self.saved = tensors

    def save_live(self, *tensors: Tensor | None) -> None:
        """Keep tensors that the backward pass writes to."""
        self.live = tensors
