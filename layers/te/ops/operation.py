"""The classes of fusible operations, the rules that a subclass is checked against when it is defined, and those for
what it returns: a tensor too many would pass for another operation's.

A forward pass is either one method, or two: `compute`, a pure function, and `save_ctx`, to decide what the backward
pass gets. With two the fuser can compute without saving, as inference and recomputation do, and the compiler runs the
second once, on fake tensors. It may rely on the input, the call and what compute returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ...module.extra_state import leave_extra_state
from ...quantizer.state import AnyQuantizer
from .call import Computed, Gradients, Input, Needs, OperationArguments, OperationCall, OperationContext


def _split_forward(cls: type, root: type, prefix: str) -> bool | None:
    """Return whether the forward pass of an operation's class is split; None if it has no forward pass.

    The first class along the method resolution order that defines one form decides, a plain mixin too: it hides the
    other form of the classes behind it. TypeError if that class defines half a pair, or both forms. root: the base,
    whose own methods only say what there is to define.
    """
    names = (f"{prefix}_forward", f"{prefix}_forward_compute", f"{prefix}_forward_save_ctx")
    for owner in cls.__mro__[: cls.__mro__.index(root)]:
        whole, compute, save = (name in owner.__dict__ for name in names)
        if compute != save:
            has, lacks = (names[1], names[2]) if compute else (names[2], names[1])
            raise TypeError(f"{owner.__name__} defines {has} without {lacks}; allowed: both, or {names[0]} alone")
        if whole and compute:
            raise TypeError(f"{owner.__name__} defines {names[0]} and {names[1]}; allowed: one of the two forms")
        if whole or compute:
            return compute
    return None


class FusibleOperation(nn.Module):
    """Base of basic operations and of modules that consist of them."""

    def basic_operations(self) -> tuple[BasicOperation, ...]:
        """Return the basic operations that this stands for, in order."""
        raise NotImplementedError

    def forward(self, x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run this operation alone; see `Sequential`."""
        from .sequential import basic_parts, fused_groups, run_groups

        return run_groups(fused_groups(*basic_parts(self.basic_operations())), x, *extra_inputs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        leave_extra_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BasicOperation(FusibleOperation):
    """One differentiable step.

    A subclass defines or inherits `op_forward_compute` and `op_forward_save_ctx`, or `op_forward`; and `op_backward`:
    TypeError otherwise. What unfinished classes share goes into a mixin that is no operation.
    NUM_EXTRA_INPUTS, NUM_EXTRA_OUTPUTS: tensors besides the input and the output. TAKES_QUANTIZED: whether the input
    may be QuantizedRows; otherwise it is dequantized before. SPLIT_FORWARD: which form of forward pass it has.
    """

    SPLIT_FORWARD: ClassVar[bool]
    NUM_EXTRA_INPUTS: int = 0
    NUM_EXTRA_OUTPUTS: ClassVar[int] = 0
    TAKES_QUANTIZED: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        split = _split_forward(cls, BasicOperation, "op")
        if split is None:
            raise TypeError(
                f"{cls.__name__} has no forward pass; define op_forward, or op_forward_compute and op_forward_save_ctx"
            )
        if cls.op_backward is BasicOperation.op_backward:
            raise TypeError(f"{cls.__name__} has no op_backward; every operation defines or inherits one")
        cls.SPLIT_FORWARD = split

    def basic_operations(self) -> tuple[BasicOperation, ...]:
        return (self,)

    def forward(self, x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        from .fuser import OperationFuser

        return OperationFuser((self,))(x, *extra_inputs)

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        """Look up parameters, live state and the recipe in force. device_type: of the group's input."""
        return OperationArguments()

    def input_quantizer(self, call: OperationCall) -> AnyQuantizer | None:
        """Return the quantizer that the operation before may apply to its result; None: it shall not."""
        return None

    def op_forward(self, ctx: OperationContext, x: Input, call: OperationCall) -> Computed:
        """Compute and fill ctx, in one step."""
        raise NotImplementedError

    def op_forward_compute(self, x: Input, call: OperationCall) -> Computed:
        """Compute, without side effects besides recording in live tensors."""
        raise NotImplementedError

    def op_forward_save_ctx(self, ctx: OperationContext, x: Input, computed: Computed, call: OperationCall) -> None:
        """Fill ctx with what `op_backward` needs."""
        raise NotImplementedError

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        """Return the gradients. dy: of the output; extra_gradients: of the extra outputs."""
        raise NotImplementedError


class FusedOperation:
    """Several basic operations in one step, in the forward pass, the backward pass or both.

    A subclass says with `matches` where it fits, and defines `fuser_forward_compute` and `fuser_forward_save_ctx`, or
    `fuser_forward`, to fuse the forward pass; `fuser_backward` to fuse the backward pass. Each basic operation has the
    context that it would have had alone, so the two passes are fused independently. No module: it owns nothing.
    """

    FORWARD: ClassVar[bool] = False
    BACKWARD: ClassVar[bool] = False
    SPLIT_FORWARD: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        split = _split_forward(cls, FusedOperation, "fuser")
        cls.FORWARD, cls.SPLIT_FORWARD = split is not None, bool(split)
        cls.BACKWARD = cls.fuser_backward is not FusedOperation.fuser_backward
        if not (cls.FORWARD or cls.BACKWARD):
            raise TypeError(
                f"{cls.__name__} fuses nothing; define fuser_forward, or fuser_forward_compute and "
                "fuser_forward_save_ctx, or fuser_backward"
            )

    def __init__(self, operations: Sequence[BasicOperation]) -> None:
        self.operations = tuple(operations)

    @classmethod
    def matches(cls, operations: Sequence[BasicOperation]) -> int:
        """Return how many of the operations, from the first on, this fuses; 0 for none."""
        raise NotImplementedError

    def fuser_forward(
        self, contexts: Sequence[OperationContext], x: Input, calls: Sequence[OperationCall]
    ) -> tuple[Computed, ...]:
        """Compute and fill the contexts, in one step. Returns what each basic operation would have."""
        raise NotImplementedError

    def fuser_forward_compute(self, x: Input, calls: Sequence[OperationCall]) -> tuple[Computed, ...]:
        """Return what each basic operation would have; only the last output has to be real."""
        raise NotImplementedError

    def fuser_forward_save_ctx(
        self,
        contexts: Sequence[OperationContext],
        x: Input,
        computed: Sequence[Computed],
        calls: Sequence[OperationCall],
    ) -> None:
        """Fill the contexts of the basic operations."""
        raise NotImplementedError

    def save_each(
        self,
        contexts: Sequence[OperationContext],
        x: Input,
        computed: Sequence[Computed],
        calls: Sequence[OperationCall],
    ) -> None:
        """Let each basic operation fill its own context: a `fuser_forward_save_ctx` for fusions that compute as their
        parts do."""
        for operation, context, result, call in zip(self.operations, contexts, computed, calls, strict=True):
            if call.needs.any():
                operation.op_forward_save_ctx(context, x, result, call)
            x = result.output

    def fuser_backward(
        self, contexts: Sequence[OperationContext], dy: Tensor, extra_gradients: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Gradients, ...]:
        """Return the gradients of each basic operation, in order; only the first one's input gradient has to be."""
        raise NotImplementedError


class Step(NamedTuple):
    """A basic operation in a group: how many tensors of each kind are its own, and its constants."""

    operation: BasicOperation
    parameters: int
    tensors: int
    extra_inputs: int
    constants: Any
    needs: Needs


def check_computed(
    operation: BasicOperation | FusedOperation, steps: Sequence[Step], computed: Sequence[Computed]
) -> None:
    """Raise TypeError where a forward pass returned no Computed for each step, ValueError for another number of extra
    outputs than the step's operation declares."""
    _check_kind(operation, "forward", steps, computed, Computed)
    for step, result in zip(steps, computed, strict=True):
        declared, found = step.operation.NUM_EXTRA_OUTPUTS, len(result.extra_outputs)
        if found != declared:
            raise ValueError(
                f"the forward pass of {_name(operation)} returned {found} extra outputs; {_name(step.operation)} "
                f"declares NUM_EXTRA_OUTPUTS = {declared}"
            )


def check_gradients(
    operation: BasicOperation | FusedOperation, steps: Sequence[Step], gradients: Sequence[Gradients]
) -> None:
    """Raise TypeError where a backward pass returned no Gradients for each step, ValueError for another number of them
    than the step has parameters or extra inputs, and where the input's gradient is missing."""
    _check_kind(operation, "backward", steps, gradients, Gradients)
    for step, gradient in zip(steps, gradients, strict=True):
        for kind, found, own in (
            ("parameters", gradient.parameters, step.parameters),
            ("extra inputs", gradient.extra_inputs, step.extra_inputs),
        ):
            if found and len(found) != own:
                raise ValueError(
                    f"the backward pass of {_name(operation)} returned gradients of {len(found)} {kind}; "
                    f"{_name(step.operation)} has {own}"
                )
    if steps[0].needs.input and gradients[0].input is None:
        raise ValueError(f"the backward pass of {_name(operation)} returned no gradient of its input, which is needed")


def _check_kind(operation: Any, which: str, steps: Sequence[Step], found: Any, wanted: type) -> None:
    if len(found) != len(steps):
        raise ValueError(f"the {which} pass of {_name(operation)} returned {len(found)} results; allowed: {len(steps)}")
    for result in found:
        if not isinstance(result, wanted):
            raise TypeError(
                f"the {which} pass of {_name(operation)} returned a {type(result).__name__}; allowed: a "
                f"{wanted.__name__}"
            )


def _name(operation: Any) -> str:
    return type(operation).__name__
