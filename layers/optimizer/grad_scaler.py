"""Loss scaling for parameters whose gradients are accumulated in `main_grad`.

torch's GradScaler reads `.grad` alone: what layers added to `.main_grad` would stay scaled and unchecked, by a factor
of 65536 at first. This one divides and checks what the optimizer will read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .fused_adamw import FusedAdamW, gradient_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` over `gradient_of(parameter)`: `.grad`, or `.main_grad` with what arrived in `.grad`.

    Arguments, methods and state dicts are torch's. `FusedAdamW` refuses torch's own where a parameter has a
    `main_grad`; without any the two are the same.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: list[
            torch.Tensor
        ] = []  # stands in for the parameters: torch looks at `.grad`, which here is of any dtype
        for group in optimizer.param_groups:
            for gradient in map(gradient_of, group["params"]):
                if gradient is not None:
                    found.append(gradient.detach())
                    found[-1].grad = gradient.detach()
        stand_in: Any = SimpleNamespace(param_groups=[{"params": found}])
        return super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Divide the gradients by the scale, if `unscale_` has not, and step unless one is infinite or NaN."""
        if not isinstance(optimizer, FusedAdamW):
            return super().step(optimizer, *args, **kwargs)
        optimizer.scaler_reads_main_grads = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer.scaler_reads_main_grads = False
