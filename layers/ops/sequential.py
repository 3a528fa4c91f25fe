"""A chain of modules in which neighbouring fusible operations run as one group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..recompute import checkpointed
from .groups import Group, groups_of, parts_of, run_groups


class Sequential(nn.Sequential):
    """Run modules one after the other and fuse neighbouring operations. Transformer Engine: `te.ops.Sequential`.

    Extra inputs and outputs are those of the operations, in order; a module that is no operation takes and returns one
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
        parts, alone = parts_of(self)
        before, alone_before = self._grouped
        if alone != alone_before or any(a is not b for a, b in zip(parts, before, strict=True)):
            self._grouped, self._groups = (parts, alone), groups_of(parts, alone)
        return self._groups

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output, or (output, *extra outputs). ValueError for another number of extra inputs."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._run(input, *extra_inputs)
        return checkpointed(self._run, input, *extra_inputs)

    def _run(self, x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return run_groups(self.groups(), x, *extra_inputs)
