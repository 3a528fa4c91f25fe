"""The gradients of a function, derived from the function: backward passes of references, which are written once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gradients_of(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `function(*inputs)` in every input, given dy of its result; it runs again for that."""
    pull = torch.func.vjp(function, *inputs)[1]
    return pull(dy)
