"""A CUDA device where there is none: tensors without values, on which the library takes the way that it takes on a GPU.

What a device would compute is not computed, so nobody can read it: a number asked of such a tensor is an error, as
everything is that makes the host wait for the device."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Apart(TorchDispatchMode):
    """Refuses what the device and the host exchange: copies, numbers, and arguments on both of one operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = tree_leaves((args, kwargs or {}, result))
        devices = {value.device.type for value in values if isinstance(value, Tensor)}
        if len(devices) > 1:
            raise AssertionError(f"{func} has tensors on {' and '.join(sorted(devices))}")
        return result


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside, tensors may be made on "cuda"; other ones have no values either."""
    with FakeTensorMode():
        yield
