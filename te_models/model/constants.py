"""Float32 tensors that a module computes from its configuration rather than learns.

A plain buffer would be rounded by `model.to(torch.bfloat16)`, ruinous for rotary frequencies, and would be garbage
after `to_empty` on a model built on the meta device. These are recomputed on the module's device, not converted.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class ConstantModule(nn.Module):
    """Interface: a module whose non-persistent buffers are the result of `constants`."""

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors by buffer name, on `device`."""
        raise NotImplementedError

    def register_constants(self, device: torch.device | str | None) -> None:
        """Create the buffers; called at the end of `__init__`."""
        for name, tensor in self._on(torch.empty((), device=device).device).items():
            self.register_buffer(name, tensor, persistent=False)

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """Return `constants`; without values on the meta device, where torch's arithmetic would import its compiler:
        longer than reading a small model takes."""
        if device.type != "meta":
            return self.constants(device)
        here = self.constants(torch.device("cpu"))
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in here.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        devices = {buffer.device for buffer in self.buffers(recurse=False)}
        for device in devices:
            for name, tensor in self._on(device).items():
                setattr(self, name, tensor)
        return self
