"""Check the numbers of quantized weights, of our folders and of Hugging Face's alike: a scale that no quantization
gives makes every weight of its block meaningless, and a NaN among the eight-bit numbers spreads from there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..io.box_reads import cut_rows
from ..io.errors import CheckpointError
from ..io.store import FileStore

_PART = 1 << 18
_E8M0_NAN = 255
_LOW_BITS, _ONES, _HIGH_BITS = 0x7F7F7F7F7F7F7F7F, 0x0101010101010101, -0x7F7F7F7F7F7F7F80


def check_scales(store: FileStore, names: Iterable[str]) -> None:
    """Read these scales and amaxes; raise CheckpointError naming the first that no quantization gives."""
    for name in names:
        for box in cut_rows(store.tensors[name].shape, 4 * _PART):
            check_values(name, store.read(name, box))


def check_values(name: str, scales: torch.Tensor) -> None:
    """Raise CheckpointError where these scales, stored as `name` or a part of it, hold a NaN, an infinity, a negative
    number or a zero.

    Scales stored as bytes are exponents (E8M0), in which 255 is NaN. Of scales in E4M3, and of amaxes, zeros are those
    of blocks and matrices that are zero.
    """
    zeros = scales.dtype == torch.float8_e4m3fn or name.endswith("_amax")
    for part in scales.flatten().split(_PART):
        if part.dtype in (torch.uint8, torch.float8_e8m0fnu):
            finite, wrong = part.view(torch.uint8) != _E8M0_NAN, False
        else:
            numbers = part.float()
            finite, wrong = torch.isfinite(numbers), bool((numbers < 0 if zeros else numbers <= 0).any())
        if not finite.all():
            raise CheckpointError(f"{name!r} has a scale that is NaN or infinite, so its weight has no values")
        if wrong:
            what = "negative" if zeros else "zero or negative"
            raise CheckpointError(f"{name!r} has a scale that is {what}, so its weight has no values")


def check_elements(name: str, data: memoryview, dtype: str) -> None:
    """Raise CheckpointError where these bytes of the tensor `name`, in F8_E4M3 or F8_E5M2, hold a NaN."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype == "F8_E4M3":  # a NaN is seven ones below the sign: of eight bytes at once, one that a carry goes out of
        body = raw[: len(raw) // 8 * 8]
        body = body.clone() if body.data_ptr() % 8 else body
        words = body.view(torch.int64)
        found = bool(((words & _LOW_BITS) + _ONES & _HIGH_BITS).any()) or bool((raw[len(body) :] & 127 == 127).any())
    else:
        found = bool(raw.view(torch.float8_e5m2).float().isnan().any())
    if found:
        raise CheckpointError(f"{name!r} holds a NaN among its quantized numbers, so its weight has no values")
