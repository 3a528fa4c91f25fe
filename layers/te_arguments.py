"""Arguments of Transformer Engine that mean nothing here: taken at their defaults, so that calls move unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

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


def require_default(name: str, value: object, default: object) -> None:
    """Raise ValueError unless the value is the default, or says "no" as the default does."""
    says_no = default in (None, False) and value in (None, False) if isinstance(value, bool | None) else False
    if not says_no and not (type(value) is type(default) and value == default):
        raise ValueError(f"{name} is {value!r}, which this library does not have; allowed: {default!r}")
