"""State dicts of Transformer Engine: the weights are taken, the pickled state of a recipe beside them is not read."""

from __future__ import annotations

import io
import warnings
from typing import Any

from torch import Tensor, nn

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
