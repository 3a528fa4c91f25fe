"""A forward and a backward operation as one differentiable function: a whole layer behind one boundary.

What lies between the two follows from the names of the backward implementation's parameters: autograd's setup-context
and the order of saved tensors are written nowhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from .registration import Registered, caller, entry_of
from .results import make_results
from .schema import SchemaParameter

NEEDS = "needs"


def differentiable(forward: CustomOpDef, backward: CustomOpDef, *, gradients: Sequence[str]) -> Callable[..., Any]:
    """Return both operations as one function of keyword arguments: the forward's parameters, then those that
    only the backward has.

    forward: returns a NamedTuple; its first field is the function's result, the others are for the backward pass.
    backward: returns a tuple or list, the gradient of each parameter named in `gradients` or None. Its parameters are
    found by name: `d<first field>` is the gradient that comes in; the forward's fields and parameters are kept, as
    saved tensors and constants, unless backward writes to them: such a tensor is held as it is, because other passes
    may have written to it in between. Both may ask for `needs`, list[bool]: whether each gradient is wanted.
    TypeError for a forward without named fields and for a gradient of what is no parameter.
    """
    ahead, back = entry_of(forward), entry_of(backward)
    run_forward = caller(forward)
    fields = _fields_of(ahead)
    incoming = f"d{fields[0]}"
    parameter_names = tuple(p.name for p in ahead.parameters)
    own = [name for name in parameter_names if name != NEEDS]
    own += [p.name for p in back.parameters if p.name not in (*own, *fields, incoming, NEEDS)]
    if not set(gradients) <= set(own):
        raise TypeError(f"{ahead.name} has no parameter {', '.join(sorted(set(gradients) - set(own)))}")
    wanted = tuple(own.index(name) for name in gradients)
    kept_ones = [(p, _to_save(p, back.mutates)) for p in back.parameters if p.name not in (incoming, NEEDS)]

    def step(values: dict[str, Any], needs: list[bool]) -> Any:
        values = {**values, NEEDS: needs}
        return run_forward(**{name: values[name] for name in parameter_names})

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            values = dict(zip(own, arguments, strict=True))
            found = step(values, [ctx.needs_input_grad[i] for i in wanted])
            values.update(zip(fields, found, strict=True))
            saved: list[Tensor] = []
            ctx.held = []
            for parameter, holds in kept_ones:
                ctx.held.append(_keep(parameter.leaves(values[parameter.name]), holds, saved))
            ctx.save_for_backward(*saved)
            return found[0]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            needs = [ctx.needs_input_grad[i] for i in wanted]
            saved, held = ctx.saved_tensors, list(ctx.held)
            flat: list[Any] = []
            values: dict[str, Any] = {}
            at = 0
            for parameter in back.parameters:
                if parameter.name == incoming:
                    leaves: list[Any] = [dy]
                elif parameter.name == NEEDS:
                    leaves = [needs]
                else:
                    leaves, at = _restored(held.pop(0), saved, at)
                flat += parameter.encoded(leaves)
                values[parameter.name] = parameter.of_leaves(leaves)
            found = back.op(*flat)
            found = make_results(back.described(values), found, values) if back.whole else found
            by_index = dict(zip(wanted, found, strict=True))
            return tuple(by_index.get(i) for i in range(len(own)))

    Run.__name__ = Run.__qualname__ = f"{ahead.name}_function"

    def call(**values: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(values, [False] * len(wanted))[0]
        return Run.apply(*(values[name] for name in own))

    return call


def _fields_of(entry: Registered) -> tuple[str, ...]:
    returned = entry.returns
    if not hasattr(returned, "_fields"):
        raise TypeError(f"{entry.name} returns {returned}; a differentiable operation returns a NamedTuple")
    return returned._fields


def _to_save(parameter: SchemaParameter, written: Sequence[str]) -> tuple[bool, ...]:
    """Return of each leaf whether it is for autograd to save: tensors that the backward pass does not write to."""
    by_leaf = sorted(zip(parameter.order, parameter.slots, strict=True))
    return tuple(slot.holds_tensor and slot.name not in written for _, slot in by_leaf)


def _keep(leaves: Sequence[Any], to_save: Sequence[bool], saved: list[Tensor]) -> list[tuple[int, Any]]:
    """Move a value's tensors to `saved` and return, leaf by leaf, (how many they were, -1 for none; the rest)."""
    held: list[tuple[int, Any]] = []
    for leaf, saves in zip(leaves, to_save, strict=True):
        if leaf is None or not saves:
            held.append((-1, leaf))
        elif isinstance(leaf, Tensor):
            saved.append(leaf)
            held.append((1, None))
        else:
            saved.extend(leaf)
            held.append((len(leaf), list))
    return held


def _restored(held: Sequence[tuple[int, Any]], saved: Sequence[Tensor], at: int) -> tuple[list[Any], int]:
    """Return the leaves of a value, and where the saved tensors of the next one begin."""
    leaves: list[Any] = []
    for count, rest in held:
        if count < 0:
            leaves.append(rest)
        else:
            own = saved[at : at + count]
            leaves.append(list(own) if rest is list else own[0])
            at += count
    return leaves, at
