"""What the layers with weights have in common: creating parameters, initialising them, choosing the compute dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .autocast import state

InitMethod = Callable[[Tensor], object]


def default_init_method(weight: Tensor) -> Tensor:
    """Fill with N(0, 0.023^2), Transformer Engine's default."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a GEMM on x runs in: that of an enabled `torch.amp.autocast`, else x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def empty_parameter(*shape: int, params_dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialised parameter; `params_dtype` None is torch's default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=params_dtype or torch.get_default_dtype(), device=device))


@torch.no_grad()
def stored_weight(weight: nn.Parameter, name: str = "") -> nn.Parameter:
    """Return an initialised weight in the form `quantized_model_init` asks for: itself, or quantized.

    weight: [out, in] or grouped [num_gemms, out, in]; name: the layer's qualified name, for per-module rules.
    """
    recipe = state().storage
    recipe = None if recipe is None else recipe.for_module(name)
    if recipe is None:
        return weight
    quantizer = recipe.weight_quantizer()
    parameter = nn.Parameter(quantizer.quantize(weight) if weight.dim() == 2 else quantizer.quantize_grouped(weight))
    if state().preserve_init_val:
        _preserve(parameter, weight.detach())
    return parameter


def _preserve(parameter: nn.Parameter, value: Tensor) -> None:
    """Give the parameter its value before quantization, on the CPU, and the two methods that read and free it."""
    kept = [value.to("cpu", copy=True)]

    def get_high_precision_init_val() -> Tensor | None:
        return kept[0] if kept else None

    parameter.get_high_precision_init_val = get_high_precision_init_val  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = kept.clear  # type: ignore[attr-defined]
