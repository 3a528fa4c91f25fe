"""Registration: an implementation and a function that describes its results become an operation of the compiler.

The function of results asks for the arguments it depends on by their names, and runs no kernel: it is traced, with
symbolic sizes under dynamic shapes. An argument that the implementation writes to is named in `mutates`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from .arguments import Parameter, parameters_of, values_of
from .output import Output

Results = Output | Sequence[Output] | None


class Registered(NamedTuple):
    """An operation: what is called, its parameters, its results and what these depend on, and what it writes to."""

    name: str
    op: CustomOpDef
    parameters: tuple[Parameter, ...]
    results: Callable[..., Results]
    depends_on: tuple[str, ...]
    mutates: tuple[str, ...]

    def describe(self, *flat: Any) -> Results:
        """Return the description of the results for arguments as in the schema; trailing defaults may be missing."""
        values = values_of(self.parameters, flat)
        return self.results(**{name: values[name] for name in self.depends_on})

    def fake(self, *flat: Any) -> Any:
        """Allocate the results, not filled: the implementation on fake tensors."""
        described = self.describe(*flat)
        if described is None or isinstance(described, Output):
            return described.empty() if described is not None else None
        return type(described)(output.empty() for output in described)  # type: ignore[call-arg]


_REGISTERED: dict[str, Registered] = {}


def registered() -> dict[str, Registered]:
    """Return every operation registered so far, by name."""
    return dict(_REGISTERED)


def operation(
    name: str, results: Callable[..., Results], *, mutates: Iterable[str] = ()
) -> Callable[[Callable], CustomOpDef]:
    """Register the decorated implementation as `torch.ops.te_models.<name>`.

    results: describes what is returned, one `Output`, a tuple or a list of them as the implementation's annotation has
    it, or None; its parameters are names of the implementation's. What is returned is called with the arguments of the
    schema: objects as `flatten` gives their fields. TypeError where an annotation fits no schema or a name is unknown.
    """

    def register(function: Callable) -> CustomOpDef:
        parameters, depends_on = parameters_of(function), tuple(inspect.signature(results).parameters)
        unknown = {*depends_on, *mutates} - {p.name for p in parameters}
        if unknown:
            raise TypeError(f"{name} has no parameter {', '.join(sorted(unknown))} to describe its results by")
        op = torch.library.custom_op(f"te_models::{name}", _flat(function, parameters), mutates_args=tuple(mutates))
        entry = Registered(name, op, parameters, results, depends_on, tuple(mutates))
        op.register_fake(entry.fake)
        _REGISTERED[name] = entry
        return op

    return register


def _flat(function: Callable, parameters: tuple[Parameter, ...]) -> Callable:
    """Return the implementation as a function of the schema's arguments."""
    if all(p.plan is None and p.slots[0].decode is None for p in parameters):
        return function

    def implementation(*flat: Any) -> Tensor | tuple[Tensor, ...] | list[Tensor] | None:
        return function(**values_of(parameters, flat))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [
        inspect.Parameter(slot.name, kind, annotation=slot.annotation, default=parameter.flat_default)
        for parameter in parameters
        for slot in parameter.slots
    ]
    returned = typing.get_type_hints(function)["return"]
    returned = None if returned is type(None) else returned  # which infer_schema does not know
    implementation.__signature__ = inspect.Signature(signature, return_annotation=returned)  # type: ignore[attr-defined]
    implementation.__doc__, implementation.__name__ = function.__doc__, function.__name__
    implementation.__module__ = function.__module__
    return implementation
