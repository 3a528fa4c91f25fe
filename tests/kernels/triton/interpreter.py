"""Corrections of the interpreter of Triton 3.6 to 3.9, which the tests apply while they use it.

- Casts of float32 to a narrower float truncate, or round in a way of their own, where a GPU rounds to nearest even;
  casts back lose subnormals of bfloat16 and infinities of float16 and FP8.
- `range` over a kernel's argument needs `int()` of a one-element array, which numpy 2.4 refuses.
- A comparison keeps the type of what it compared, so a scalar one, spread over a tile, becomes a tile of integers,
  which loads and stores of 3.9 refuse as a mask.

And one for time: each launch replaces the functions of triton.language and puts them back, a third of the time of most.
Here the first launch of a test replaces them, until the end of the test.
"""

import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.patches import Patching

_ROUNDED = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float16: (torch.float16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
}
_convert_float = interpreter._convert_float
_patch_lang_tensor = interpreter._patch_lang_tensor
_create_splat = interpreter.InterpreterBuilder.create_splat


def _cast_as_torch(data: np.ndarray, source, target, rounding_mode) -> np.ndarray:
    data = np.ascontiguousarray(data)
    if source == tl.float32 and target in _ROUNDED:
        dtype, bits, stored = _ROUNDED[target]
        values = torch.from_numpy(data.view(np.float32)).to(dtype)
        return values.view(bits).numpy().view(stored).reshape(data.shape)
    if target == tl.float32 and source in _ROUNDED:
        dtype, bits, _ = _ROUNDED[source]
        signed = np.int16 if bits == torch.int16 else np.uint8
        return torch.from_numpy(data.view(signed)).view(dtype).float().numpy().reshape(data.shape)
    return _convert_float(data, source, target, rounding_mode)


def _patch_tensor_with_index(tensor, scope) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _splat_truth(self, block_type, scalar):
    if scalar.data.dtype == np.bool_:
        scalar = interpreter.TensorHandle(scalar.data, tl.int1)
    return _create_splat(self, block_type, scalar)


_BUILTINS: dict[Any, list[tuple[str, Any]]] = {}
"""Of each module and class of triton.language: the functions that a launch replaces, by name."""


def _patch_known_builtins(pkg, builder, scope) -> None:
    if pkg not in _BUILTINS:
        _BUILTINS[pkg] = [(name, member) for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
    for name, member in _BUILTINS[pkg]:
        interpreter._patch_attr(pkg, name, member, builder, scope)


class _UntilTheEndOfTheTest:
    """What a launch replaces, as the interpreter's own scope does."""

    def __init__(self, monkeypatch: Patching) -> None:
        self._monkeypatch = monkeypatch

    def set_attr(self, obj: object, name: str, value: object) -> None:
        self._monkeypatch.setattr(obj, name, value, raising=False)

    def restore(self) -> None:
        """The test does, at its end."""


def correct(monkeypatch: Patching) -> None:
    """Apply them until the end of the test."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", _splat_truth)
    monkeypatch.setattr(interpreter, "_convert_float", _cast_as_torch)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_tensor_with_index)
    monkeypatch.setattr(interpreter, "_patch_builtin", _patch_known_builtins)
    scope = _UntilTheEndOfTheTest(monkeypatch)
    monkeypatch.setattr(interpreter, "_LangPatchScope", lambda: scope)
    patched: set[frozenset[str]] = set()
    patch = interpreter._patch_lang

    def patch_once(fn):
        langs = frozenset(v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core)
        if langs not in patched:
            patched.add(langs)
            patch(fn)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
