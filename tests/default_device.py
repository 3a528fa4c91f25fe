"""A default device that only the package sees: `pytest --default-device meta` runs tests whose tensors are on the CPU,
while a tensor that the package, or torch on its behalf, makes without naming a device has no memory.

A user's `torch.device("meta")` would reach the tests' own tensors and layers as well. Layers that tests build without a
device are the tests' own: a constructor hands its `device=None` on."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = tuple(f"{_ROOT / folder}/" for folder in ("kernels", "layers", "checkpoints", "te_models"))
_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def defaulting(default: torch.device | torch.dtype) -> Iterator[None]:
    """Inside, torch's default device or dtype is this one."""
    if isinstance(default, torch.device):
        with default:
            yield
        return
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def package_default(device: str) -> Iterator[None]:
    """Inside, the package's default device is this one; tests that compile are skipped, as torch cannot trace that."""
    from torch.fx.experimental import proxy_tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", _skip)
        patch.setattr(torch.export, "export", _skip)
        patch.setattr(proxy_tensor, "make_fx", _skip)
        with _PackageDefault(device):
            yield


def _skip(*arguments: Any, **options: Any) -> Any:
    pytest.skip("torch cannot trace the mode in which the package has a default device")


class _PackageDefault(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and "device" not in kwargs and _of_package(sys._getframe(1)):
            kwargs["device"] = self.device
        return func(*args, **kwargs)


def _of_package(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is not torch's runs code of the package."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)
