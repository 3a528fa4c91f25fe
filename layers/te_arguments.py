"""What calls and state dicts of Transformer Engine hold that means nothing here, so that both move unchanged.

Such arguments are taken at their defaults. The weights of a state dict are loaded; the pickled state of a recipe beside
them is not read.
"""

from __future__ import annotations

import enum
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
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


def torch_dtype(dtype: Any) -> Any:
    """Return a dtype as torch's, whoever named it."""
    return dtype.value if isinstance(dtype, DType) else dtype


AMAX_REDUCTION: dict[str, Any] = {"with_amax_reduction": False, "amax_reduction_group": None}
"""Of quantizers: here the parts of a matrix share an amax under FSDP2, see `share_scales`."""


def takes_and_ignores(*names: str, position: int | None = None) -> Callable[[F], F]:
    """Let a function take these keyword arguments, too, which nothing depends on; the first also as the positional one
    of this number, self counted as 0."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            if position is not None and len(args) == position + 1:
                args = args[:-1]
            return function(*args, **{name: value for name, value in arguments.items() if name not in names})

        return cast(F, call)

    return decorate


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
