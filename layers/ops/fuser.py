"""Finding what can be fused, and running the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_models.kernels.torch_versions import fix_width

from .call import Needs, as_input, as_result
from .function import GroupFunction, Plan, run_forward
from .operation import BasicOperation, FusedOperation, FusibleOperation
from .returned import Step

Part = tuple[BasicOperation | FusedOperation, int, int]


class OperationFuser:
    """A group of operations that runs as one: `fuser(x, *extra_inputs)`.

    Modules are taken apart into basic operations, which the registered fusions (`fused.FUSIONS`) group anew: once for
    the forward and once for the backward pass.
    """

    def __init__(self, operations: Sequence[FusibleOperation]) -> None:
        from .fused import FUSIONS

        self.basic: tuple[BasicOperation, ...] = tuple(b for op in operations for b in op.basic_operations())
        self.num_extra_inputs = sum(op.NUM_EXTRA_INPUTS for op in self.basic)
        self.num_extra_outputs = sum(op.NUM_EXTRA_OUTPUTS for op in self.basic)
        self.forward_parts = _parts(self.basic, [f for f in FUSIONS if f.FORWARD])
        self.backward_parts = _parts(self.basic, [f for f in FUSIONS if f.BACKWARD])

    def __call__(self, x: Tensor, *extra_inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the group. x: its input, which may be a quantized matrix; extra_inputs: those of the operations, in
        order. Returns the output, or (output, *extra outputs). ValueError for another number of extra inputs, TypeError
        for one that is no tensor."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise ValueError(
                f"{len(extra_inputs)} extra inputs were given; the operations take {self.num_extra_inputs}"
            )
        for i, argument in enumerate((x, *extra_inputs)):
            if not isinstance(argument, Tensor):
                what = f"extra input {i}" if i else "the input"
                raise TypeError(f"{what} of operations is a {type(argument).__name__}; allowed: a tensor")
        grad = torch.is_grad_enabled()
        needed = grad and x.requires_grad
        steps: list[Step] = []
        tensors: list[Tensor | None] = []
        at = 0
        for operation in self.basic:
            mine = operation.fuser_arguments(x.device.type)
            extra = extra_inputs[at : at + operation.NUM_EXTRA_INPUTS]
            at += operation.NUM_EXTRA_INPUTS
            wants = Needs(
                needed,
                tuple(grad and p is not None and p.requires_grad for p in mine.parameters),
                tuple(grad and e.requires_grad for e in extra),
            )
            needed = wants.any()
            counts = (len(mine.parameters), len(mine.tensors), len(extra))
            steps.append(Step(operation, *counts, mine.constants, wants))
            tensors += [*mine.parameters, *mine.tensors, *extra]
        plan = Plan(tuple(steps), self.forward_parts, self.backward_parts)
        if needed:
            fix_width(x)
            results = GroupFunction.apply(plan, x, *tensors)
        else:
            y, extra_outputs, _ = run_forward(plan, as_input(x), tuple(tensors), save=False)
            results = (as_result(y), *extra_outputs)
        return results if self.num_extra_outputs else results[0]


def _parts(basic: tuple[BasicOperation, ...], fusions: Sequence[type[FusedOperation]]) -> tuple[Part, ...]:
    """Cover the operations with fused ones, the longest that fits first, and single ones."""
    parts: list[Part] = []
    at = 0
    while at < len(basic):
        found = None
        for fusion in fusions:
            length = fusion.matches(basic[at:])
            if length and (found is None or length > found[1]):
                found = (fusion, length)
        if found is None:
            parts.append((basic[at], at, at + 1))
            at += 1
        else:
            fusion, length = found
            parts.append((fusion(basic[at : at + length]), at, at + length))
            at += length
    return tuple(parts)
