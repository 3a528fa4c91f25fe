"""The one place where delayed scaling's histories and scales move on."""

import torch
import torch.distributed as dist

from te_models.kernels.compiling import compiling

from ..quantizer.delayed import ROLES, next_history, next_scale, reduce_amaxes
from ..recipe.base import Format
from ..recipe.recipe_use import live_modules
from ..recipe.recipes import DelayedRule
from .base import QuantizedModule

# found here: torch 2.11 does not trace the method of an enum's member
_DTYPES = {fp8_format is Format.HYBRID: [fp8_format.dtype(role) for role in ROLES] for fp8_format in Format}
"""Whether the format is the hybrid one -> the dtypes of the roles."""


def leave_region(touched: list[QuantizedModule] | None, group: dist.ProcessGroup | None, *, failed: bool) -> None:
    """Update the modules that recorded amaxes in the region that ends: in training if gradients are wanted now, in a
    calibration in any case, and none in a region that `failed`, whose other ranks may be elsewhere. Where there is no
    update, what the forward passes recorded is forgotten: it is no part of a step. RuntimeError for a module that a
    region of another thread records, too.

    Only these, so that ranks which run the same regions join the same reductions, whatever other models each has.
    Gradients are asked about here and not in each module, because torch's reentrant checkpoints run theirs without.
    touched: the modules that may have; None: all live ones.
    """
    due, shared, training = [], [], torch.is_grad_enabled()
    for module in live_modules() if touched is None else touched:
        use = module.recipe_use.in_thread.now
        if use.recorded or use.calibrated:
            if not compiling() and module.recipe_use.records_elsewhere():
                shared.append(module)
            elif not failed and (use.calibrated or training):
                due.append(module)
            else:
                module.fp8_amax.zero_()
            use.recorded = use.calibrated = False
    if shared and not failed:
        shared[0].recipe_use.refuse_two_regions(shared[0])
    if due:
        update_delayed_scaling(due, group)


@torch.no_grad()
def update_delayed_scaling(
    modules: list[QuantizedModule] | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Update the scales of the modules that run under DelayedScaling from the amaxes recorded since the last update.

    `autocast` does this at the exit of the outermost region, for the layers that ran in it. Calling it after a backward
    pass, too, changes nothing but when the gradient scales become visible: an amax of 0 says that a tensor was not
    quantized, and such a role keeps its history and scale. modules: None takes all live ones that ever ran under it.
    group: the ranks to reduce over (None: all ranks); every one of them must make the call, with the same modules.
    """
    by_rule: dict[DelayedRule, list[QuantizedModule]] = {}
    for module in live_modules() if modules is None else modules:
        if module.delayed_rule is not None:
            by_rule.setdefault(module.delayed_rule, []).append(module)
    for rule, together in by_rule.items():
        if compiling() or not torch.is_inference_mode_enabled():
            _update(rule, together, group)
        else:  # training steps, too, use the scales that it makes, and save them for the backward pass
            with torch.inference_mode(mode=False), torch.no_grad():
                _update(rule, together, group)


def _update(rule: DelayedRule, modules: list[QuantizedModule], group: dist.ProcessGroup | None) -> None:
    amaxes = [torch.cat((m.fp8_amax, m.recorded_gradient_amax()[None])) for m in modules]
    history_len, margin, algorithm, reduce_amax, hybrid = rule
    if reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        shared = [i for i, module in enumerate(modules) if module.reduce_amax]
        reduced = reduce_amaxes([amaxes[i] for i in shared], group) if shared else []
        for i, amax in zip(shared, reduced, strict=True):
            amaxes[i] = amax
    sizes = [a.shape[1] for a in amaxes]
    last = torch.cat(amaxes, dim=1)
    history = torch.cat([m.delayed_history(history_len - 1) for m in modules], dim=2)
    scale = torch.cat([m.fp8_scale for m in modules], dim=1)
    # written on the device: a copy of a list from the host would make the host wait, and no CUDA graph takes it
    limits = torch.stack([torch.full_like(last[0], torch.finfo(dtype).max) for dtype in _DTYPES[hybrid]])
    amax_of = torch.cat((last[None], history))
    scale = next_scale(scale, amax_of, last, limits, margin, algorithm)
    history = next_history(history, last)
    parts = zip(modules, history.split(sizes, dim=2), scale.split(sizes, dim=1), strict=True)
    for module, its_history, its_scale in parts:
        module.move_scales_on(its_scale.contiguous(), its_history.contiguous())
    outer = [module for module in modules if module.outer_used]
    if outer:
        _update_outer(rule, outer, group)


def _update_outer(rule: DelayedRule, modules: list[QuantizedModule], group: dist.ProcessGroup | None) -> None:
    """Update what outputs and input gradients are scaled by, in the layers that quantize these."""
    history_len, margin, algorithm, reduce_amax, hybrid = rule
    amaxes = [module.fp8_outer_amax.clone() for module in modules]
    if reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        amaxes = reduce_amaxes(amaxes, group)
    for module, last in zip(modules, amaxes, strict=True):
        history, scale = module.outer_history(history_len - 1), module.fp8_outer_scale
        limits = torch.stack([torch.full_like(last[0], torch.finfo(_DTYPES[hybrid][role]).max) for role in (0, 2)])
        module.fp8_outer_scale = next_scale(scale, torch.cat((last[None], history)), last, limits, margin, algorithm)
        module.fp8_outer_history = next_history(history, last)
        module.fp8_outer_amax.zero_()
