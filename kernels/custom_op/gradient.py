"""Gradients of registered operations: what is kept between forward and backward, derived from a list of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

Backward = Callable[..., Mapping[str, Tensor | None]]


def gradient_of(
    op: CustomOpDef, *, saves: Sequence[str] = (), saves_results: Sequence[int] = (), constant: Sequence[int] = ()
) -> Callable[[Backward], Backward]:
    """Register the decorated function as the gradient of `op`.

    saves: the arguments kept for it, tensors as autograd's saved tensors, the rest as they are; "bias.dtype" keeps an
    attribute, None of None. saves_results: likewise by position. constant: results without a gradient. The function is
    called with what was kept (attributes by name, `bias_dtype`; `results`, a list), `needs`, the set of arguments whose
    gradient is wanted, and the gradients of the other results; it returns gradients by argument, and the rest is None.
    """

    def register(backward: Backward) -> Backward:
        names = [argument.name for argument in op._opoverload._schema.arguments]
        unknown = {name.partition(".")[0] for name in saves} - set(names)
        if unknown:
            raise TypeError(f"{op._qualname} has no argument {', '.join(sorted(unknown))} to save")

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            results = (output,) if isinstance(output, Tensor) else output
            to_save = {
                name.replace(".", "_"): _kept(inputs[names.index(name.partition(".")[0])], name) for name in saves
            }
            tensors = {name: value for name, value in to_save.items() if isinstance(value, Tensor)}
            ctx.mark_non_differentiable(*(results[i] for i in constant))
            ctx.save_for_backward(*tensors.values(), *(results[i] for i in saves_results))
            ctx.names = list(tensors)
            ctx.constants = {name: value for name, value in to_save.items() if name not in tensors}

        def run(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            tensors = ctx.saved_tensors
            saved = SimpleNamespace(**ctx.constants, **dict(zip(ctx.names, tensors)))
            saved.results = list(tensors[len(ctx.names) :])
            # torch leaves out trailing arguments that have their default
            needs = {name for name, needed in zip(names, ctx.needs_input_grad, strict=False) if needed}
            found = backward(saved, needs, *(g for i, g in enumerate(grads) if i not in constant))
            if not found.keys() <= set(names):
                raise TypeError(f"{op._qualname} has no argument {', '.join(sorted(found.keys() - set(names)))}")
            return tuple(found.get(name) for name in names)

        op.register_autograd(run, setup_context=setup)
        return backward

    return register


def _kept(value: Any, name: str) -> Any:
    attribute = name.partition(".")[2]
    return value if not attribute or value is None else getattr(value, attribute)
