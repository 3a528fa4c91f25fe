"""Weights that are quantized once per step and kept for its later micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..functional.saved_input import note_statistics
from ..quantizer import Quantizer
from ..quantizer.delayed import Float8Quantizer, bind
from ..recipe.context import state
from ..tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from .base import QuantizedModule

_KEPT = "weight_cache"  # of attributes that hold a weight for later micro-batches


def _slot(gemm: int | None) -> str:
    return _KEPT if gemm is None else f"{_KEPT}{gemm}"


def kept_weight(
    module: QuantizedModule, quantizer: Quantizer, weights: tuple[Tensor, ...], gemm: int | None
) -> QuantizedTensor:
    """Return what is kept of `weights` for a GEMM (None: for all together), which `quantizer` must have made."""
    before = getattr(module, _slot(gemm), None)
    if before is None:
        raise RuntimeError("is_first_microbatch=False, but no earlier call had is_first_microbatch=True")
    wanted = bind(quantizer, module.fp8_scale, None, "weight", gemm)
    if before.quantizer != (wanted.value if isinstance(wanted, Float8Quantizer) else wanted):
        raise ValueError(
            f"the kept weight was made by {before.quantizer}, but the recipe in force wants {wanted}; call "
            "with is_first_microbatch=True, and without noop, after a change of recipe"
        )
    return before


@torch.no_grad()
def keep_weight(
    module: QuantizedModule, quantizer: Quantizer, weights: tuple[Tensor, ...], gemm: int | None
) -> QuantizedTensor:
    """Quantize a weight, keep and return it; where `microbatch(noop=...)` is nonzero, what was kept stays kept."""
    noop = state().keep_kept
    before = None
    if noop is not None and _slot(gemm) in vars(module):
        before = kept_weight(module, quantizer, weights, gemm)
    delayed = module.delayed_rule is not None
    scale, amax = (module.fp8_scale, module.fp8_amax if module.training else None) if delayed else (None, None)
    live = bind(quantizer, scale, amax, "weight", gemm)
    one = weights[0] if len(weights) == 1 else torch.stack(weights)
    cached = live.quantize(one) if one.dim() == 2 else live.quantize_grouped(one)
    if before is not None and noop is not None:
        cached.quantize_(before, noop=noop == 0)  # a new tensor: a backward pass may still need the old one
    if state().statistics and module.training:
        into = module.fp8_statistics[(gemm or 0) % len(module.fp8_statistics)]
        note_statistics(into[1], bind(quantizer, scale, None, "weight", gemm), one)
    setattr(module, _slot(gemm), cached)
    return cached


def move_kept_weights(module: QuantizedModule, device: torch.device, dtype: torch.dtype) -> None:
    """Take what is kept to another device; forget it where the weights have become others, by another dtype or on the
    meta device."""
    for slot in [name for name in vars(module) if name.startswith(_KEPT)]:
        kept = getattr(module, slot)
        if device.type == "meta" or kept.dtype != dtype:
            delattr(module, slot)
        elif kept.device != device:
            setattr(module, slot, kept.to(device))


def forget_kept_weights(module: QuantizedModule) -> None:
    """Forget what is kept, for the weights have other values now."""
    for slot in [name for name in vars(module) if name.startswith(_KEPT)]:
        delattr(module, slot)
