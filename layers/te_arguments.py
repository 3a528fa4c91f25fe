"""What calls and state dicts of Transformer Engine hold that means nothing here, so that both move unchanged.

Arguments that would mean something are taken at their defaults, those that change no result at any value, and those
that have another name here under either name. The weights of a state dict are loaded; the pickled state of a recipe
beside them is not read.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])

TRACKER = {"get_rng_state_tracker": None}
"""States of random generators per parallel rank: here split weights start as parts of the unsplit one's."""
USER_BUFFERS: dict[str, Any] = {
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "symmetric_ar_type": None,
}
"""Communication through user buffers: here collectives are torch.distributed's."""
SHAPES = ("seq_length", "micro_batch_size")
"""Shapes that Transformer Engine warms its kernels up for."""
OF_OPERATIONS: dict[str, Any] = {
    "tensor_parallel_mode": None,
    "tensor_parallel_group": None,
    "sequence_parallel": False,
    "rng_state_tracker_function": None,
    "userbuffers_options": None,
}
"""Of operations with weights, which are not split here."""
THEIR_NAMES = {"dtype": "params_dtype", "accumulate_into_main_grad": "fuse_wgrad_accumulation"}
"""Of operations with parameters: their names of arguments -> those of the modules."""


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

        return cast(F, call)

    return decorate


def takes_without_effect(*names: str) -> Callable[[F], F]:
    """Let a function take these keyword arguments, too: hints of how to run, with the same result at every value."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            return function(*args, **{name: value for name, value in arguments.items() if name not in names})

        return cast(F, call)

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

        return cast(F, call)

    return decorate


def require_default(name: str, value: object, default: object) -> None:
    """Raise ValueError unless the value is the default, or says "no" as the default does."""
    says_no = default in (None, False) and value in (None, False) if isinstance(value, bool | None) else False
    if not says_no and not (type(value) is type(default) and value == default):
        raise ValueError(f"{name} is {value!r}, which this library does not have; allowed: {default!r}")


KEY = "_extra_state"


def leave_extra_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take `_extra_state` out of what is to be loaded, and warn where it holds something: Transformer Engine pickles
    the scales and amaxes of delayed scaling there, and no pickle of a state dict is opened. A pre-hook of loading."""
    held = state_dict.pop(prefix + KEY, None)
    if _holds_something(held):
        warnings.warn(
            f"the state dict has {prefix + KEY}, a pickled state of Transformer Engine's, which is not read: the "
            "weights are loaded, and the scales of delayed scaling start anew",
            stacklevel=2,
        )


def _holds_something(held: Any) -> bool:
    if isinstance(held, Tensor):
        return held.numel() > 0
    if isinstance(held, io.BytesIO):
        return held.getbuffer().nbytes > 0
    return held is not None
