"""Gradients of registered operations: what is kept between forward and backward, derived from a list of names."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

Backward = Callable[..., Mapping[str, Tensor | None]]


def register_gradient(
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

        parts = []  # what is saved is called so, of the argument at this place, and of it this attribute
        for name in saves:
            argument, _, attribute = name.partition(".")
            parts.append((name.replace(".", "_"), names.index(argument), attribute))

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            results = (output,) if isinstance(output, Tensor) else output
            tensors: dict[str, Any] = {}
            constants: dict[str, Any] = {}
            for name, place, attribute in parts:
                value = inputs[place]
                if attribute and value is not None:
                    value = getattr(value, attribute)
                (tensors if isinstance(value, Tensor) else constants)[name] = value
            ctx.mark_non_differentiable(*map(results.__getitem__, constant))
            ctx.save_for_backward(*tensors.values(), *map(results.__getitem__, saves_results))
            ctx.names, ctx.constants = list(tensors), constants

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
