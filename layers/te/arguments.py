"""What calls of Transformer Engine hold that means nothing here, so that they move unchanged.

Arguments that would mean something are taken at their defaults, those that change no result at any value, and those
that have another name here under either name.
"""

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from te_models.suggestions import shown

F = TypeVar("F", bound=Callable[..., Any])

USER_BUFFERS: dict[str, Any] = {
    "ub_tp_comm_overlap": False,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "symmetric_ar_type": None,
}
"""Communication through user buffers: here collectives are torch.distributed's. A layer of one rank has none."""
SHAPES = ("seq_length", "micro_batch_size")
"""Shapes that Transformer Engine warms its kernels up for."""
OF_OPERATIONS: dict[str, Any] = {"userbuffers_options": None}
"""Of linear operations: collectives are torch.distributed's."""
THEIR_NAMES = {"dtype": "params_dtype", "accumulate_into_main_grad": "fuse_wgrad_accumulation"}
"""Operations with parameters: an argument's name -> its name in the modules."""


DType = enum.Enum(
    "DType",
    {
        "kByte": torch.uint8,
        "kInt32": torch.int32,
        "kFloat32": torch.float32,
        "kFloat16": torch.float16,
        "kBFloat16": torch.bfloat16,
        "kFloat8E4M3": torch.float8_e4m3fn,
        "kFloat8E5M2": torch.float8_e5m2,
        "kFloat4E2M1": "float4_e2m1",
    },
    module=__name__,
)
"""Dtypes by their names in Transformer Engine (`tex.DType`); the value is torch's, for E2M1 its name."""


def require_default(name: str, value: object, default: object) -> None:
    """Raise ValueError unless the value is the default, or says "no" as the default does: nobody's option is passed
    over in silence."""
    says_no = default in (None, False) and value in (None, False) if isinstance(value, bool | None) else False
    if not says_no and not (type(value) is type(default) and value == default):
        raise ValueError(f"{name} is {shown(value)}, which this library does not have; allowed: {shown(default)}")


def add_members(cls: type, members: type) -> None:
    """Give a class of the core the methods and properties of another one."""
    own = vars(members).items()
    for name, member in own:
        if name not in ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"):
            setattr(cls, name, member)


def _noted(call: Any, function: Any, names: Iterable[str], kind: str) -> Any:
    """Note on a function that it takes arguments which its signature does not have, for the table of differences."""
    call.also_taken = getattr(function, "also_taken", {}) | dict.fromkeys(names, kind)
    return call


def takes_at_default(**defaults: Any) -> Callable[[F], F]:
    """Let a function take these keyword arguments, too, each at its default (or another value that says "no").

    Any other value raises ValueError: nothing is passed over in silence.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            for name in arguments.keys() & defaults.keys():
                require_default(name, arguments.pop(name), defaults[name])
            return function(*args, **arguments)

        return _noted(call, function, defaults, "only at its default")

    return decorate


def takes_parallel_options(constructor: F) -> F:
    """Let the constructor of a module take Transformer Engine's options of parallel layers, too.

    USER_BUFFERS: any value in a layer of one rank, where there is nothing to communicate; else the defaults, or
    ValueError. ub_name, the name of a buffer: any. get_rng_state_tracker: a function that returns a tracker of random
    states; parameters are initialised, and attention drops out, inside its `fork()`, or `fork(rng_tracker_name)`.
    """

    @functools.wraps(constructor)
    def call(
        self: nn.Module,
        *args: Any,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        ub_name: str | None = None,
        **arguments: Any,
    ) -> None:
        buffers = {name: arguments.pop(name) for name in arguments.keys() & USER_BUFFERS.keys()}
        group, ranks = arguments.get("tp_group"), arguments.get("tp_size", 1)
        if dist.is_available() and isinstance(group, dist.ProcessGroup):  # the constructor refuses anything else
            ranks = group.size()
        for name, value in buffers.items() if ranks > 1 else ():
            require_default(name, value, USER_BUFFERS[name])
        if get_rng_state_tracker is None:
            constructor(self, *args, **arguments)
            return
        with get_rng_state_tracker().fork(*(() if rng_tracker_name is None else (rng_tracker_name,))):
            constructor(self, *args, **arguments)
        for module in self.modules():
            module.get_rng_state_tracker = get_rng_state_tracker  # type: ignore[assignment]

    named = ("get_rng_state_tracker", "rng_tracker_name", "ub_name")
    return _noted(_noted(call, constructor, named, "keyword only"), call, USER_BUFFERS, "at any value on one rank")


def takes_without_effect(*names: str, position: int | None = None) -> Callable[[F], F]:
    """Let a function take these keyword arguments, too: hints of how to run, with the same result at every value.

    position: the first of them is also the positional argument of this number, self counted as 0.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            if position is not None and len(args) == position + 1:
                args = args[:-1]
            return function(*args, **{name: value for name, value in arguments.items() if name not in names})

        first = 0 if position is None else 1
        return _noted(_noted(call, function, names[first:], "keyword only"), call, names[:first], "as there")

    return decorate


def takes_also(**names: str) -> Callable[[F], F]:
    """Let a function take keyword arguments under Transformer Engine's names, too. names: theirs -> ours. ValueError
    where one is given under both."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            for theirs in arguments.keys() & names.keys():
                if names[theirs] in arguments:
                    raise ValueError(f"{theirs} and {names[theirs]} are both given; allowed: one, they are the same")
                arguments[names[theirs]] = arguments.pop(theirs)
            return function(*args, **arguments)

        return _noted(call, function, names, "keyword only")

    return decorate


def takes_in_order(
    order: str, also: Mapping[str, Any], without_effect: Mapping[str, Any], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a constructor take its arguments by position in Transformer Engine's order, and these at their defaults, as
    `takes_at_default` does; the class has the defaults as attributes. order: the names; also: of some, another value
    that says the same; without_effect: arguments that may have any value, and their defaults."""
    names, known = order.split(), {**defaults, **without_effect}
    # the compiler traces constructors and knows strings, but not what a default may be: it is the class's attribute
    refused, ignored = tuple(defaults), tuple(without_effect)

    def decorate(constructor: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(constructor)
        def call(self: Any, *args: Any, **arguments: Any) -> None:
            if len(args) > len(names):
                raise TypeError(f"{type(self).__name__} takes {len(names)} arguments by position; got {len(args)}")
            for name, value in zip(names, args, strict=False):
                if name in arguments:
                    raise TypeError(f"{type(self).__name__} got multiple values for argument {name!r}")
                arguments[name] = value
            for name in ignored:
                arguments.pop(name, None)
            for name in refused:
                if name not in arguments:
                    continue
                value = arguments.pop(name)
                value = tuple(value) if isinstance(value, list) else value
                if not (name in also and value == also[name]):
                    require_default(name, value, getattr(type(self), name))
            constructor(self, **arguments)

        call.__signature__ = _in_order(inspect.signature(constructor), names, known)  # type: ignore[attr-defined]
        return call

    return decorate


def _in_order(own: inspect.Signature, names: Sequence[str], defaults: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature with these names by position and all others by keyword."""
    mine, kinds = own.parameters, inspect.Parameter
    found = [mine["self"]]
    by_keyword = [name for name in {**mine, **defaults} if name not in names and name != "self"]
    for name in (*names, *by_keyword):
        kind = kinds.POSITIONAL_OR_KEYWORD if name in names else kinds.KEYWORD_ONLY
        at_default = kinds(name, kind, default=defaults.get(name))
        found.append(mine[name].replace(kind=kind) if name in mine else at_default)
    return own.replace(parameters=found)
