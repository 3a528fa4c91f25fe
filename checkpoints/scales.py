"""Check the scales of quantized weights: one that is no finite number makes every weight of its block meaningless."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .errors import CheckpointError
from .store import FileStore

_PART = 1 << 18
_E8M0_NAN = 255


def check_scales(store: FileStore, names: Iterable[str]) -> None:
    """Raise CheckpointError naming the first of these stored scales that holds a NaN or an infinity.

    Scales stored as bytes are exponents (E8M0), in which 255 is NaN.
    """
    for name in names:
        check_values(name, store.view(name))


def check_values(name: str, scales: torch.Tensor) -> None:
    """Raise CheckpointError where these scales, stored as `name` or a part of it, hold a NaN or an infinity."""
    for part in scales.flatten().split(_PART):
        bad = part == _E8M0_NAN if part.dtype == torch.uint8 else ~torch.isfinite(part.float())
        if bad.any():
            raise CheckpointError(f"the scales {name!r} are not all finite numbers")
