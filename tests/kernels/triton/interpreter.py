"""Two corrections of Triton 3.6's interpreter, which the tests apply while they use it.

- Casts of float32 to a narrower float truncate, or round in a way of their own, where a GPU rounds to nearest even.
- `range` over a kernel's argument needs `int()` of a one-element array, which numpy 2.4 refuses.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_ROUNDED = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float16: (torch.float16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
}
_convert_float = interpreter._convert_float
_patch_lang_tensor = interpreter._patch_lang_tensor


def _round_to_nearest_even(data: np.ndarray, source, target, rounding_mode) -> np.ndarray:
    if source != tl.float32 or target not in _ROUNDED:
        return _convert_float(data, source, target, rounding_mode)
    dtype, bits, stored = _ROUNDED[target]
    values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(dtype)
    return values.view(bits).numpy().view(stored).reshape(data.shape)


def _patch_tensor_with_index(tensor, scope) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply both until the end of the test."""
    monkeypatch.setattr(interpreter, "_convert_float", _round_to_nearest_even)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_tensor_with_index)
