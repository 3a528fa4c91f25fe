"""Finding which operations of a group can be fused, and running the result: the one autograd function of a group.

Its tensor arguments are the group's input and then, for each basic operation, its parameters, other tensors and extra
inputs. `FusionPlan` says which is which; it holds the operations and constants, no tensors.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import fix_width, own_result

from ...gemm.double_backward import made_inside
from .call import Computed, Input, Needs, OperationCall, OperationContext, QuantizedRows, as_input, as_result
from .operation import BasicOperation, FusedOperation, FusibleOperation, Step, check_computed, check_gradients


class FusionPlan(NamedTuple):
    """forward, backward: the same steps as (operation, first step, end), each fused in its own way."""

    steps: tuple[Step, ...]
    forward: tuple[tuple[BasicOperation | FusedOperation, int, int], ...]
    backward: tuple[tuple[BasicOperation | FusedOperation, int, int], ...]


def _calls(steps: tuple[Step, ...], tensors: tuple[Tensor | None, ...]) -> list[OperationCall]:
    """Give each step its tensors, and the quantizer that the next one would have it apply."""
    calls: list[OperationCall] = []
    at = 0
    for step in steps:
        ends = (at + step.parameters, at + step.parameters + step.tensors)
        end = ends[1] + step.extra_inputs
        extra: Any = tensors[ends[1] : end]
        parts = (tensors[at : ends[0]], tensors[ends[0] : ends[1]], extra)
        calls.append(OperationCall(*parts, step.constants, step.needs))
        at = end
    for i in range(len(steps) - 1):
        calls[i] = calls[i]._replace(next_input=steps[i + 1].operation.input_quantizer(calls[i + 1]))
    return calls


def run_forward(
    plan: FusionPlan, x: Input, tensors: tuple[Tensor | None, ...], save: bool
) -> tuple[Input, list[Tensor], list[OperationContext]]:
    """Return the output, the extra outputs and (if save) a context for each step."""
    calls = _calls(plan.steps, tensors)
    contexts = [OperationContext(step.needs) for step in plan.steps]
    extra_outputs: list[Tensor] = []
    for operation, begin, end in plan.forward:
        if isinstance(x, QuantizedRows) and not plan.steps[begin].operation.TAKES_QUANTIZED:
            x = x.dequantize()
        computed = _compute(operation, contexts[begin:end], x, calls[begin:end], save)
        check_computed(operation, plan.steps[begin:end], computed)
        for result in computed:
            extra_outputs += result.extra_outputs
        x = computed[-1].output
    return x, extra_outputs, contexts


def _compute(
    operation: BasicOperation | FusedOperation,
    contexts: list[OperationContext],
    x: Input,
    calls: list[OperationCall],
    save: bool,
) -> tuple[Computed, ...]:
    if isinstance(operation, FusedOperation):
        if not operation.SPLIT_FORWARD:
            return operation.fuser_forward(contexts, x, calls)
        results = operation.fuser_forward_compute(x, calls)
        if save:
            operation.fuser_forward_save_ctx(contexts, x, results, calls)
        return results
    if not operation.SPLIT_FORWARD:
        return (operation.op_forward(contexts[0], x, calls[0]),)
    result = operation.op_forward_compute(x, calls[0])
    if save and calls[0].needs.any():
        operation.op_forward_save_ctx(contexts[0], x, result, calls[0])
    return (result,)


class GroupFunction(torch.autograd.Function):
    """plan: Plan; x: the input, plain or quantized; tensors: the steps' tensors. Returns the output, extra outputs."""

    @staticmethod
    def forward(ctx: Any, plan: FusionPlan, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        y, extra_outputs, contexts = run_forward(plan, as_input(x), tensors, save=True)
        tensors_in = [t for t in (x, *tensors) if t is not None]
        saved: list[Tensor | None] = []
        live: list[Tensor | None] = []
        left = []  # of each context, what is not a tensor
        for context in contexts:
            saved += context.saved
            live += context.live
            left.append((len(context.saved), len(context.live), context.constants))
        ctx.save_for_backward(*saved)
        ctx.live, ctx.left, ctx.plan = live, left, plan
        if not compiling():  # a graph has no second derivatives
            inputs = {id(t) for t in tensors_in}
            ctx.inside = [c.needs.input and t is not None and id(t) not in inputs for c in contexts for t in c.saved]
        # autograd wants results that are not each other
        results: list[Tensor] = []
        for result in (as_result(own_result(y) if isinstance(y, Tensor) else y), *extra_outputs):
            results.append(result.clone() if any(result is other for other in (*results, *tensors_in)) else result)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *extra_gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan: FusionPlan = ctx.plan
        saved = ctx.saved_tensors
        if torch.is_grad_enabled() and not compiling():
            kinds = list(zip(saved, ctx.inside, strict=True))
            depends_on = [dy, *extra_gradients, *(t for t, inside in kinds if not inside)]
            saved = [made_inside(t, depends_on) if inside else t for t, inside in kinds]
        contexts = _contexts(plan, ctx.left, saved, ctx.live)
        extras: list[tuple[Tensor, ...]] = []
        at = 0
        for step in plan.steps:
            count = step.operation.NUM_EXTRA_OUTPUTS
            extras.append(tuple(extra_gradients[at : at + count]))
            at += count
        found: list[Tensor | None] = []  # gradients of the tensors, from the end
        dx: Tensor | None = dy
        for operation, begin, end in reversed(plan.backward):
            if not any(step.needs.any() for step in plan.steps[begin:end]):
                dx = None
                found = [None] * sum(s.parameters + s.tensors + s.extra_inputs for s in plan.steps[:end]) + found
                break
            assert dx is not None, "checked where it was returned"
            if isinstance(operation, FusedOperation):
                gradients = operation.fuser_backward(contexts[begin:end], dx, extras[begin:end])
            else:
                gradients = (operation.op_backward(contexts[begin], dx, extras[begin]),)
            check_gradients(operation, plan.steps[begin:end], gradients)
            dx = gradients[0].input
            mine: list[Tensor | None] = []
            for step, gradient in zip(plan.steps[begin:end], gradients, strict=True):
                extra = gradient.extra_inputs or (None,) * step.extra_inputs
                parameters = gradient.parameters or (None,) * step.parameters
                mine += [*parameters, *(None,) * step.tensors, *extra]
            found = mine + found
        return None, dx, *found


def _contexts(plan: FusionPlan, left: Any, saved: Sequence[Any], live: list[Any]) -> list[OperationContext]:
    """Rebuild each step's context from what `forward` saved."""
    contexts = []
    at = live_at = 0
    for step, (count, live_count, constants) in zip(plan.steps, left, strict=True):
        context = OperationContext(step.needs)
        context.save_for_backward(*saved[at : at + count])
        context.save_live(*live[live_at : live_at + live_count])
        context.constants = constants
        contexts.append(context)
        at, live_at = at + count, live_at + live_count
    return contexts


Part = tuple[BasicOperation | FusedOperation, int, int]


class OperationFuser:
    """A group of operations that runs as one: `fuser(x, *extra_inputs)`.

    Modules are taken apart into basic operations, and the registered fusions (`fused.FUSIONS`) group these: once for
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
        """Run the group. x: its input, perhaps a quantized matrix; extra_inputs: the operations' extra inputs, in
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
        plan = FusionPlan(tuple(steps), self.forward_parts, self.backward_parts)
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
