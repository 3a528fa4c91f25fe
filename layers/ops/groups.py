"""Modules as they run one after the other: neighbouring fusible operations as one group, others by themselves.

A group runs its operations without calling them as modules, so an operation with hooks is none of it: it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .fuser import OperationFuser
from .operation import BasicOperation, FusibleOperation

Group = OperationFuser | nn.Module


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def parts_of(modules: Iterable[nn.Module]) -> tuple[tuple[nn.Module, ...], tuple[bool, ...]]:
    """Return the modules, operations taken apart into basic ones, and of each whether it runs alone: what is no
    operation, or has hooks. An operation with hooks is not taken apart."""
    parts: list[nn.Module] = []
    alone: list[bool] = []
    for module in modules:
        if isinstance(module, BasicOperation):
            own: Sequence[nn.Module] = (module,)
        elif isinstance(module, FusibleOperation) and not has_hooks(module):
            own = module.basic_operations()
        else:
            own = (module,)
        parts += own
        alone += [not isinstance(part, BasicOperation) or has_hooks(part) for part in own]
    return tuple(parts), tuple(alone)


def groups_of(parts: Sequence[nn.Module], alone: Sequence[bool]) -> tuple[Group, ...]:
    """Return what to run for `parts_of`: an OperationFuser for neighbouring operations, what runs alone as it is."""
    groups: list[Group] = []
    run: list[BasicOperation] = []
    for part, by_itself in zip(parts, alone, strict=True):
        if isinstance(part, BasicOperation) and not by_itself:
            run.append(part)
            continue
        if run:
            groups.append(OperationFuser(run))
        run = []
        groups.append(part)
    if run:
        groups.append(OperationFuser(run))
    return tuple(groups)


def run_groups(groups: Sequence[Group], x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return the output, or (output, *extra outputs). ValueError for another number of extra inputs."""
    counts = [_extra(group) for group in groups]
    expected = sum(takes for takes, _ in counts)
    if len(extra_inputs) != expected:
        raise ValueError(f"{len(extra_inputs)} extra inputs were given; the operations take {expected}")
    extra_outputs: list[Tensor] = []
    at = 0
    for group, (takes, gives) in zip(groups, counts, strict=True):
        result: Any = group(x, *extra_inputs[at : at + takes])
        at += takes
        if gives:
            x, *found = result
            extra_outputs += found
        else:
            x = result
    return (x, *extra_outputs) if extra_outputs else x


def _extra(group: Group) -> tuple[int, int]:
    """Return how many extra inputs a group takes and how many extra outputs it gives."""
    if isinstance(group, OperationFuser):
        return group.num_extra_inputs, group.num_extra_outputs
    if not isinstance(group, FusibleOperation):
        return 0, 0
    basic = group.basic_operations()
    return sum(op.NUM_EXTRA_INPUTS for op in basic), sum(op.NUM_EXTRA_OUTPUTS for op in basic)
