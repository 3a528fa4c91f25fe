"""What calls and state dicts of Transformer Engine hold that means nothing here, so that both move unchanged.

Such arguments are taken at their defaults. The weights of a state dict are loaded; the pickled state of a recipe beside
them is not read.
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

        call.taken_at_default = getattr(function, "taken_at_default", {}) | defaults  # type: ignore[attr-defined]
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
