"""A chain of modules in which neighbouring fusible operations run as one group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..recompute import checkpointed
from .fuser import OperationFuser
from .operation import FusibleOperation

Group = OperationFuser | nn.Module


class Sequential(nn.Sequential):
    """Run modules one after the other and fuse neighbouring operations. Transformer Engine: `te.ops.Sequential`.

    Extra inputs and outputs are those of the operations, in order; a module that is no operation takes and returns one
    tensor. recompute: keep only the inputs for the backward pass and run forward again in it (activation
    checkpointing); it repeats the first run exactly, also under a recipe.
    """

    def __init__(self, *modules: nn.Module, recompute: bool = False) -> None:
        super().__init__(*modules)
        self.recompute = recompute
        self._grouped: tuple[nn.Module, ...] = ()
        self._groups: tuple[Group, ...] = ()
        self.groups()

    def groups(self) -> tuple[Group, ...]:
        """Return the modules as they run: an OperationFuser for neighbouring operations, others as they are."""
        modules = tuple(self)
        # a part of an operation, a bias say, can have been exchanged or taken away
        parts = tuple(
            part
            for module in modules
            for part in (module.basic_operations() if isinstance(module, FusibleOperation) else (module,))
        )
        if len(parts) != len(self._grouped) or any(a is not b for a, b in zip(parts, self._grouped, strict=True)):
            groups: list[Group] = []
            run: list[FusibleOperation] = []
            for module in modules:
                if isinstance(module, FusibleOperation):
                    run.append(module)
                    continue
                if run:
                    groups.append(OperationFuser(run))
                run = []
                groups.append(module)
            if run:
                groups.append(OperationFuser(run))
            self._grouped, self._groups = parts, tuple(groups)
        return self._groups

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output, or (output, *extra outputs). ValueError for another number of extra inputs."""
        expected = sum(group.num_extra_inputs for group in self.groups() if isinstance(group, OperationFuser))
        if len(extra_inputs) != expected:
            raise ValueError(f"{len(extra_inputs)} extra inputs were given; the operations take {expected}")
        if not (self.recompute and torch.is_grad_enabled()):
            return self._run(input, *extra_inputs)
        return checkpointed(self._run, input, *extra_inputs)

    def _run(self, x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        extra_outputs: list[Tensor] = []
        at = 0
        for group in self.groups():
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            end = at + group.num_extra_inputs
            result = group(x, *extra_inputs[at:end])
            at = end
            if group.num_extra_outputs:
                x, *found = result
                extra_outputs += found
            else:
                assert isinstance(result, Tensor), "a group without extra outputs returns a tensor"
                x = result
        return (x, *extra_outputs) if extra_outputs else x
