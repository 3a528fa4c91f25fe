"""Registration: an implementation and a function that describes its results become an operation of the compiler.

The function of results asks for the arguments it depends on by their names, and runs no kernel: it is traced, with
symbolic sizes under dynamic shapes. An argument that the implementation writes to is named in `mutates`.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef

from .. import launch
from ..backend import Backend, Compiled, choose, definitions_only, has_library
from ..compiling import unobserved
from ..launch import on_gpu_of_arguments
from .results import Output, allocate_results, filled_up, flatten_results, make_results
from .schema import SchemaParameter, Slot, argument_values, parameters_of
from .takes import Takes


class Registered(NamedTuple):
    """An operation: what is called, its parameters, its results and what these depend on, and what it writes to.

    returns: the implementation's annotation; whole: whether it is more than a schema can say; the schema then has a
    list of tensors for it; places: this number of tensors instead, if not 0. implementation: of the schema's arguments,
    unchecked;
    takes: what it reads as it is given.
    """

    name: str
    op: CustomOpDef
    parameters: tuple[SchemaParameter, ...]
    results: Callable[..., Any]
    depends_on: tuple[str, ...]
    mutates: tuple[str, ...]
    returns: Any
    whole: bool
    places: int
    implementation: Callable[..., Any]
    takes: Takes | None = None

    def described(self, values: Mapping[str, Any]) -> Any:
        """Return the description of the results for these values of the parameters."""
        return self.results(**{name: values[name] for name in self.depends_on})

    def describe(self, *flat: Any) -> Any:
        """Return the description of the results for arguments as in the schema; trailing defaults may be missing."""
        return self.described(argument_values(self.parameters, flat))

    def fake(self, *flat: Any) -> Any:
        """Allocate the results, not filled: the implementation on fake tensors."""
        if self.takes is not None:
            values = argument_values(self.parameters, flat)
            arguments = [values[name] for name in self.takes.names]
            wrong = self.takes.misfit_of_fakes(*arguments)
            if wrong:
                raise ValueError(self.takes.sentence(self.name, wrong, *arguments))
        described = self.describe(*flat)
        if self.whole:
            return filled_up(allocate_results(described), self.places)
        if described is None or isinstance(described, Output):
            return described.empty() if described is not None else None
        return type(described)(output.empty() for output in described)


F = TypeVar("F", bound=Callable)
_REGISTERED: dict[str, Registered] = {}


def registered() -> dict[str, Registered]:
    """Return every operation registered so far, by name."""
    return dict(_REGISTERED)


@overload
def operation(
    name: str,
    results: Callable[..., Any],
    *,
    mutates: Iterable[str] = (),
    places: int = 8,
    takes: Takes | None = None,
    cpu_only: bool = False,
) -> Callable[[Callable], CustomOpDef]: ...
@overload
def operation(
    name: str,
    results: Callable[..., Any],
    *,
    mutates: Iterable[str] = (),
    places: int = 8,
    reference: F,
    compiled: Compiled | None = None,
    uses_operation: Callable[[Tensor], bool] | None = None,
    takes: Takes | None = None,
    cpu_only: bool = False,
) -> Callable[[F], F]: ...
def operation(  # pyright: ignore[reportInconsistentOverload]
    name: str,
    results: Callable[..., Any],
    *,
    mutates: Iterable[str] = (),
    places: int = 8,
    reference: Callable | None = None,
    compiled: Compiled | None = None,
    uses_operation: Callable[[Tensor], bool] | None = None,
    takes: Takes | None = None,
    cpu_only: bool = False,
) -> Callable[[Callable], Any]:
    """Register the decorated implementation as `torch.ops.te_models.<name>`.

    results: describes what is returned (see `results`); its parameters are names of the implementation's. mutates:
    parameters, all of whose tensors are written to, or single arguments of the schema. What is returned is called with
    the arguments of the schema, objects as `flatten` gives their fields; `caller` makes of it a function of whole
    values. places: of how many tensors results that fit no schema consist at most, in an operation that writes to
    arguments: the compiler wants each one named then.

    reference: the same function in plain torch, with the same parameters. Given one, what is returned is the function
    itself, of whole values: the operation where the first argument is on an accelerator, elsewhere the reference. The
    compiler traces the reference, and eager code calls it without a dispatcher. uses_operation: asked of the first
    argument instead of whether it is on an accelerator. A parameter by keyword only is positional in the schema,
    without its default.

    compiled: the C++ library that the implementation calls. What is returned is then the one function of eager code and
    of graphs: `choose` answers which of the library, the operation and the reference computes a call, and the operation
    asks again where a graph runs it. The library is loaded for the dtype of the first argument, and where a parameter
    is named `dtype`, for that.

    takes: what the kernel reads as it is given; of other arguments the operation, and its fake where that is known
    without sizes, is a ValueError, and what calls it goes to the definition.

    cpu_only: there is no kernel but the CPU's, and no gradient is wanted where it is called: calls go straight to the
    implementation, past torch's look-out for gradients and aliases (50 of 70 us).

    TypeError where an annotation fits no schema, a name is unknown, or the reference has other parameters.
    """

    def register(function: Callable) -> Any:
        if reference is not None and _in_words(function) != _in_words(reference):
            both = f"{_in_words(function)} and its reference {_in_words(reference)}"
            raise TypeError(f"{name} takes {both}; both have the same parameters")
        written_function = function
        if compiled is not None and reference is not None:
            function = _where_it_runs(function, reference, compiled)
        parameters, depends_on = parameters_of(function), tuple(inspect.signature(results).parameters)
        unknown = {*depends_on} - {p.name for p in parameters}
        unknown |= {*mutates} - {p.name for p in parameters} - {s.name for p in parameters for s in p.slots}
        if unknown:
            raise TypeError(f"{name} has no parameter {', '.join(sorted(unknown))} to describe its results by")
        if takes is not None and not {*takes.names} <= {p.name for p in parameters}:
            raise TypeError(f"{name} says what it takes of {', '.join(takes.names)}, which are no parameters of its")
        written = tuple(
            slot.name
            for p in parameters
            for slot in p.slots
            if slot.mutated or slot.name in mutates or (p.name in mutates and slot.holds_tensor)
        )
        if written and any(s.name == "mode" for p in parameters for s in p.slots):
            raise TypeError(f"{name} writes to arguments, and the compiler has a 'mode' of its own then: rename it")
        returns = typing.get_type_hints(function).get("return")
        whole = not _fits_a_schema(returns)
        own_places = places if whole and written else 0
        flat = _flat(function, parameters, results if whole else None, depends_on, own_places)
        implementation, flat = flat, flat if takes is None else _checked(flat, name, parameters, takes)
        devices = () if cpu_only else None
        op = torch.library.custom_op(f"te_models::{name}", flat, mutates_args=written, device_types=devices)
        entry = Registered(
            name, op, parameters, results, depends_on, written, returns, whole, own_places, implementation, takes
        )
        op.register_fake(entry.fake)
        if cpu_only and hasattr(op, "_lib"):
            op._lib.impl(name, flat, "CPU")
            op._lib.impl(name, torch.library.fallthrough_kernel, "AutogradCPU")
        elif cpu_only:  # a torch whose definitions belong to no library: the same, through the look-out
            op.register_kernel("cpu", flat)
        elif any(slot.holds_tensor for p in parameters for slot in p.slots):
            op.register_kernel("cuda", on_gpu_of_arguments(flat))
        _REGISTERED[name] = entry
        if compiled is not None and reference is not None:
            return _chosen(op, written_function, reference, compiled)
        return op if reference is None else _with_reference(op, function, reference, uses_operation)

    return register


def _checked(flat: Callable, name: str, parameters: tuple[SchemaParameter, ...], takes: Takes) -> Callable:
    """Return the implementation as one that refuses what it does not take."""

    @functools.wraps(flat)
    def run(*args: Any) -> Any:
        values = argument_values(parameters, args)
        takes.check(name, *map(values.__getitem__, takes.names))
        return flat(*args)

    return run


def _with_reference(
    op: CustomOpDef, function: F, reference: Callable, uses_operation: Callable[[Tensor], bool] | None
) -> F:
    """Return the function that calls the operation where it is used and the reference for the rest."""
    as_operation = caller(op)
    takes = entry_of(op).takes
    fits = None if takes is None else takes.fitting(function)

    @functools.wraps(function)
    def call(x: Tensor, /, *args: Any, **keywords: Any) -> Any:
        if uses_operation is not None:
            is_used = uses_operation(x)
        else:
            is_used = (x.is_cuda or launch.as_accelerator) and not definitions_only()
        if is_used and (fits is None or fits(x, *args, **keywords)):
            return as_operation(x, *args, **keywords)
        return reference(x, *args, **keywords)

    return call  # type: ignore[return-value]


def _dtype_among(function: Callable) -> tuple[int, Any]:
    """Return the place of the argument `dtype` behind the first one, and its default; -1 for a function without it."""
    parameters = inspect.signature(function).parameters
    return ([*parameters].index("dtype") - 1, parameters["dtype"].default) if "dtype" in parameters else (-1, None)


def _where_it_runs(function: F, reference: Callable, compiled: Compiled) -> F:
    """Return the implementation of an operation in a graph: of the library where there is one."""
    parameters = inspect.signature(function).parameters
    defaults = {name: p.default for name, p in parameters.items() if name == "dtype" and p.default is not p.empty}
    first, *_ = parameters

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        values = {**defaults, **dict(zip(parameters, args)), **keywords}
        key = values[first].dtype, *([values["dtype"]] if "dtype" in parameters else [])
        return (function if has_library(compiled, *key) else reference)(*args, **keywords)

    return run  # type: ignore[return-value]


def _chosen(op: CustomOpDef, function: F, reference: Callable, compiled: Compiled) -> F:
    """Return the function that asks once what computes its arguments: the library, the operation or the reference."""
    as_operation, takes = caller(op), entry_of(op).takes
    assert takes is not None, "a library is only given what it takes"
    fits, fits_in_graph = takes.fitting(function, on_cpu=True), takes.fitting(function)
    place, default = _dtype_among(function)

    @functools.wraps(function)
    def call(x: Tensor, /, *args: Any, **keywords: Any) -> Any:
        if place < 0:
            chosen = choose(compiled, x)
        else:
            chosen = choose(compiled, x, x.dtype, args[place] if len(args) > place else keywords.get("dtype", default))
        if chosen is Backend.COMPILED and fits(x, *args, **keywords):
            return function(x, *args, **keywords)
        if chosen is Backend.OPERATION and fits_in_graph(x, *args, **keywords):
            return as_operation(x, *args, **keywords)
        return reference(x, *args, **keywords)

    return call  # type: ignore[return-value]


def _in_words(function: Callable) -> str:
    """Return a function's parameters and their defaults, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))


def entry_of(op: CustomOpDef) -> Registered:
    """Return what is known of an operation."""
    return _REGISTERED[op._name]


def caller(op: CustomOpDef) -> Callable[..., Any]:
    """Return the operation as a function of what its implementation takes and returns: arguments flat and results whole
    again, eager and compiled. A result that is an alias is the very object that was passed."""
    entry = entry_of(op)
    names = tuple(p.name for p in entry.parameters)
    defaults = {p.name: p.default for p in entry.parameters if p.default is not inspect.Parameter.empty}
    flatteners = tuple(p.flattener for p in entry.parameters)

    def call(*args: Any, **keywords: Any) -> Any:
        # The compiler traces each of these lines at each call: what is passed whole and in order takes the fewest.
        if keywords or len(args) != len(names):
            args = _in_order(entry.name, names, defaults, args, keywords)
        flat: list[Any] = []
        for flatten, value in zip(flatteners, args):
            if flatten is None:
                flat.append(value)
            else:
                flat += flatten(value)
        found = op(*flat)
        if not entry.whole:
            return found
        values = dict(zip(names, args, strict=True))
        return make_results(entry.described(values), found, values)

    return call


def _in_order(
    operation: str, names: Sequence[str], defaults: Mapping[str, Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of the names. TypeError for one too many or too few."""
    found, used = list(args), 0
    for name in names[len(args) :]:
        if name in keywords:
            found.append(keywords[name])
            used += 1
        elif name in defaults:
            found.append(defaults[name])
    if len(found) != len(names) or used != len(keywords):
        got = [*names[: len(args)], *(f"argument {i + 1}" for i in range(len(names), len(args))), *keywords]
        raise TypeError(f"{operation} takes {', '.join(names)}; it was given {', '.join(got) or 'nothing'}")
    return tuple(found)


def _fits_a_schema(returned: Any) -> bool:
    """Whether a schema can say what is returned: a tensor, a tuple of some or a list of any number, or nothing."""
    if typing.get_origin(returned) is tuple:
        return set(typing.get_args(returned)) == {Tensor}
    return returned in (Tensor, list[Tensor], None, type(None))


def _flat(
    function: Callable,
    parameters: tuple[SchemaParameter, ...],
    results: Callable[..., Any] | None,
    depends_on: tuple[str, ...],
    places: int,
) -> Callable:
    """Return the implementation as a function of the schema's arguments. results: None where they fit a schema."""
    hints = typing.get_type_hints(function)
    as_it_is = all(
        isinstance(p.layout, Slot)
        and p.layout.decode is None
        and p.layout.annotation == hints[p.name]
        and not p.by_keyword
        for p in parameters
    )
    if results is None and as_it_is:
        return function

    def implementation(*flat: Any) -> Any:
        values = argument_values(parameters, flat)
        found = function(**values)
        if results is None:
            return found
        described = results(**{name: values[name] for name in depends_on})
        return filled_up(flatten_results(described, found, values), places)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [
        inspect.Parameter(slot.name, kind, annotation=slot.annotation, default=parameter.flat_default)
        for parameter in parameters
        for slot in parameter.slots
    ]
    if results is None:
        returned = hints["return"]
    else:
        returned = tuple[(Tensor,) * places] if places else list[Tensor]  # type: ignore[misc]
    returned = None if returned is type(None) else returned  # which infer_schema does not know
    implementation.__signature__ = inspect.Signature(signature, return_annotation=returned)  # type: ignore[attr-defined]
    implementation.__doc__, implementation.__name__ = function.__doc__, function.__name__
    implementation.__module__ = function.__module__
    return implementation


def direct(op: CustomOpDef) -> Callable[..., Any]:
    """Return an operation as a function of the schema's arguments. Where gradients are off, nothing is traced, all
    tensors are on the CPU, and no mode or subclass would see it, the implementation is called: the same results.

    The dispatcher takes 60 to 200 us of Python on CPU, as long as a GEMM of one token. Calls with tensors of a GPU keep
    the dispatcher, because it makes that GPU the current one.
    """
    implementation = entry_of(op).implementation

    def call(*args: Any) -> Any:
        return implementation(*args) if _unseen(args) else op(*args)

    return call


def _unseen(args: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled() or not unobserved():
        return False
    for a in args:
        if not isinstance(a, Tensor):
            continue
        if type(a) not in (Tensor, nn.Parameter) or not a.is_cpu or a.layout is not torch.strided:
            return False
        if a.is_neg() or a._is_zerotensor():  # which the dispatcher sees to
            return False
    return True
