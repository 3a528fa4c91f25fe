"""What operations return, checked against what they declare: a tensor too many would pass for another operation's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .call import Computed, Gradients, Needs
from .operation import BasicOperation, FusedOperation


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
    than the step has parameters or extra inputs, and where that of the input is missing."""
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
