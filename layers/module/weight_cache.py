"""Weights that are quantized once per step and cached for its later micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import equal_values

from ..gemm.scaling import record_statistics
from ..quantizer import Quantizer
from ..quantizer.state import value_of, with_state
from ..recipe.context import state
from ..tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from .base import QuantizedModule

CANNOT_CACHE = (
    "a compiled graph cannot cache a quantized weight: call cache_weights(model) before the step's first micro-batch, "
    "and run all of them with is_first_microbatch=False or microbatch(first=False)"
)
_CACHE = "weight_cache"  # of attributes that hold a weight for later micro-batches


def _slot(gemm_index: int | None) -> str:
    return _CACHE if gemm_index is None else f"{_CACHE}{gemm_index}"


def cached_weight(
    module: QuantizedModule, quantizer: Quantizer, weights: tuple[Tensor, ...], gemm_index: int | None
) -> QuantizedTensor:
    """Return what is cached of `weights` for a GEMM (None: for all together), if `quantizer` made it.

    Where nothing is cached, the weights are quantized and cached now. RuntimeError in a compiled graph: it cannot.
    """
    before = getattr(module, _slot(gemm_index), None)
    if before is None:
        if compiling():
            raise RuntimeError(CANNOT_CACHE)
        return update_cached_weight(module, quantizer, weights, gemm_index)
    wanted = with_state(quantizer, module.fp8_scale, None, "weight", gemm_index)
    if not equal_values(before.quantizer, value_of(wanted)):
        raise ValueError(
            f"the cached weight was made by {before.quantizer}, but the recipe in force wants {wanted}; call "
            "with is_first_microbatch=True, and without noop, after a change of recipe"
        )
    return before


@torch.no_grad()
def update_cached_weight(
    module: QuantizedModule, quantizer: Quantizer, weights: tuple[Tensor, ...], gemm_index: int | None
) -> QuantizedTensor:
    """Quantize a weight, cache and return it; where `microbatch(noop=...)` is nonzero, what was cached stays."""
    noop = state().noop
    before = None
    if noop is not None and _slot(gemm_index) in vars(module):
        before = cached_weight(module, quantizer, weights, gemm_index)
    delayed = module.delayed_rule is not None
    scale, amax = (module.fp8_scale, module.fp8_amax if module.training else None) if delayed else (None, None)
    live = with_state(quantizer, scale, amax, "weight", gemm_index)
    one = weights[0] if len(weights) == 1 else torch.stack(weights)
    cached = live.quantize(one) if one.dim() == 2 else live.quantize_grouped(one)
    if before is not None and noop is not None:
        cached.quantize_(before, noop=noop == 0)  # a new tensor: a backward pass may still need the old one
    if state().statistics and module.training:
        into = module.fp8_statistics[(gemm_index or 0) % len(module.fp8_statistics)]
        record_statistics(into[1], with_state(quantizer, scale, None, "weight", gemm_index), one)
    setattr(module, _slot(gemm_index), cached)
    return cached


def move_cached_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Take what is cached to another device; forget it where the weights have become others, by another dtype or on the
    meta device."""
    for slot in [name for name in vars(module) if name.startswith(_CACHE)]:
        cached = getattr(module, slot)
        if device.type == "meta" or cached.dtype != dtype:
            delattr(module, slot)
        elif cached.device != device:
            setattr(module, slot, cached.to(device))


def forget_cached_weights(module: nn.Module) -> None:
    """Forget what is cached, for the weights have other values now."""
    for slot in [name for name in vars(module) if name.startswith(_CACHE)]:
        delattr(module, slot)
