"""`_extra_state` of a state dict: the state of a recipe as bytes where a layer wrote it; what others pickled there is
not read.

The weights beside it are loaded either way.
"""

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

KEY = "_extra_state"


def leave_extra_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take `_extra_state` out of what is to be loaded, and warn where it holds something: another library may
    have pickled the scales and amaxes of delayed scaling there, and no pickle of a state dict is opened. A pre-hook of
    loading."""
    held = state_dict.pop(prefix + KEY, None)
    if not holds_something(held):
        return
    set_extra_state = getattr(type(module), "set_extra_state", nn.Module.set_extra_state)
    if set_extra_state is not nn.Module.set_extra_state and written_here(held):
        set_extra_state(module, held)
        return
    warnings.warn(
        f"the state dict has {prefix + KEY}, a pickled state of another library's, which is not read: the weights "
        f"are loaded, and the scales of delayed scaling start anew; {EXTRA_STATE_INSTEAD}",
        stacklevel=2,
    )


EXTRA_STATE_INSTEAD = (
    "to keep them, read the pickle where that library is installed and pass fp8_scale to set_recipe_state"
)
_MARK = b'"te_models":"recipe_state"'
"""In the metadata of what `get_extra_state` of a layer returns."""


def holds_something(held: Any) -> bool:
    """Whether an extra state is more than an empty one."""
    if isinstance(held, Tensor):
        return held.numel() > 0
    if isinstance(held, io.BytesIO):
        return held.getbuffer().nbytes > 0
    return held is not None


def tensors_as_bytes(tensors: dict[str, Tensor]) -> Tensor:
    """Return tensors as the bytes of a safetensors file, uint8 [n]: nothing in it is executed when it is read."""
    from safetensors.torch import save

    data = save({name: value.detach().cpu() for name, value in tensors.items()}, {"te_models": "recipe_state"})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def written_here(held: Any) -> bool:
    """Whether an extra state is one that `tensors_as_bytes` wrote."""
    if not isinstance(held, Tensor) or held.dtype is not torch.uint8 or held.dim() != 1:
        return False
    return _MARK in bytes(held[:512].tolist())


def tensors_from_bytes(held: Tensor) -> dict[str, Tensor]:
    """Return the tensors that `tensors_as_bytes` wrote. ValueError for damaged bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(sorted(load(held.cpu().numpy().tobytes()).items()))
    except SafetensorError as error:
        raise ValueError(f"the extra state is damaged: {error}") from error
