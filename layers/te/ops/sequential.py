"""A chain of modules in which neighbouring fusible operations run as one group, others by themselves.

A group runs its operations without calling them as modules, so an operation with hooks stands outside the group: it is
called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...recipe.activation_checkpoint import checkpointed
from .fuser import OperationFuser
from .operation import BasicOperation, FusibleOperation

Group = OperationFuser | nn.Module


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def basic_parts(modules: Iterable[nn.Module]) -> tuple[tuple[nn.Module, ...], tuple[bool, ...]]:
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


def fused_groups(parts: Sequence[nn.Module], alone: Sequence[bool]) -> tuple[Group, ...]:
    """Return what to run for `basic_parts`: an OperationFuser for neighbouring operations, what runs alone as it is."""
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


class Sequential(nn.Sequential):
    """Run modules one after the other and fuse neighbouring operations. Transformer Engine: `te.ops.Sequential`.

    Extra inputs and outputs are the operations', in order; a module that is no operation takes and returns one
    tensor. recompute: keep only the inputs for the backward pass and run forward again in it (activation
    checkpointing); it repeats the first run exactly, also under a recipe.

    An operation with hooks (forward, forward pre-, full backward and full backward pre-hooks; also one inside of
    `Linear`) is called by itself, so that they run, and is not fused with its neighbours.
    """

    def __init__(self, *modules: nn.Module, recompute: bool = False) -> None:
        super().__init__(*modules)
        self.recompute = recompute
        self._grouped: tuple[tuple[nn.Module, ...], tuple[bool, ...]] = ((), ())
        self._groups: tuple[Group, ...] = ()
        self.groups()

    def __getitem__(self, idx: Any) -> Any:
        found: Any = super().__getitem__(idx)
        if isinstance(idx, slice):
            found.recompute = self.recompute
        return found

    def __add__(self, other: nn.Sequential) -> Sequential:
        return Sequential(*super().__add__(other), recompute=self.recompute)

    def __mul__(self, other: int) -> Sequential:
        return Sequential(*super().__mul__(other), recompute=self.recompute)

    def groups(self) -> tuple[Group, ...]:
        """Return the modules as they run: an OperationFuser for neighbouring operations, others, and operations with
        hooks, as they are."""
        # a part of an operation, a bias say, can have been exchanged or taken away, and hooks come and go
        parts, alone = basic_parts(self)
        before, alone_before = self._grouped
        if alone != alone_before or any(a is not b for a, b in zip(parts, before, strict=True)):
            self._grouped, self._groups = (parts, alone), fused_groups(parts, alone)
        return self._groups

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output, or (output, *extra outputs). ValueError for another number of extra inputs."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._run(input, *extra_inputs)
        return checkpointed(self._run, input, *extra_inputs)

    def _run(self, x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return run_groups(self.groups(), x, *extra_inputs)
