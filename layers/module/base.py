"""What the layers with GEMMs have in common: which quantizers are in force, the weights that are cached, and how weight
gradients are to be made."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import exporting

from ..gemm.scaling import DEFAULT_OPTIONS, GemmCall, GemmConfig, GemmOptions
from ..gemm.wgrad import weight_gradient
from ..quantizer.delayed import ROLES, update_amax_
from ..quantizer.state import NO_STATE, QuantizerState
from ..recipe.activation_checkpoint import (
    once_per_checkpoint,
    recomputing,
    refuse_around_a_graph,
    refuse_without_contexts,
    same_as_first_run,
    scratch_like,
)
from ..recipe.base import HIGH_PRECISION, GemmQuantizers, Recipe
from ..recipe.context import THREAD, RecipeContext, state
from ..recipe.recipe_use import Choice, LastUse, choose_once, untracked_side_effect
from ..recipe.recipes import DelayedScaling
from ..tensor.fsdp import sharded
from ..tensor.quantized_tensor import QuantizedTensor
from .options import WeightGradients
from .recipe_state import RecipeStateModule, as_replica
from .weight_cache import CANNOT_CACHE, cached_weight, update_cached_weight

_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


class QuantizedModule(RecipeStateModule):
    """Base of Linear, GroupedLinear, LayerNormLinear and LayerNormMLP. num_gemms: how many scales each role has; name:
    the qualified name that per-module rules and custom recipes see (`name_modules` sets it)."""

    def _replicate_for_data_parallel(self) -> Self:
        return as_replica(super()._replicate_for_data_parallel())

    weight_is_joined: bool = False  # whether the weight of one GEMM is several parameters

    def weight_names(self) -> tuple[str, ...]:
        """Return the names of the weight parameters."""
        return ("weight",)

    # --- what is in force ------------------------------------------------------------------------------------------

    def gemm_quantizers(self) -> GemmQuantizers | None:
        """Return this module's quantizers under the recipe in force; None: high precision."""
        return self._quantizers(state(), compiling())

    def _quantizers(self, now: RecipeContext, traced: bool) -> GemmQuantizers | None:
        """Return `quantizers` under what is in force `now`."""
        use = self.recipe_use
        last = None if traced or now.calibrating else use.last
        same = last is not None and last.recipe is now.compute
        if last is not None and now.compute is not None and last.recipe == now.compute and not same:
            same = last.quantizers == now.compute.quantizers(
                "", ""
            )  # what was assigned to a recipe equality does not see
        if last is not None and same and last.asked == use.asked and last.ran == use.ran:
            return last.quantizers  # as in the call before: nothing to choose or to write down
        recipe, chosen = self._chosen()
        untracked_side_effect(self._record_use, now.compute, recipe)
        quantizers = None
        if recipe is not None and not now.calibrating:
            quantizers = recipe.quantizers("", "") if chosen is None else chosen
        if not traced and recipe is now.compute and chosen is None and not isinstance(recipe, DelayedScaling):
            use.last = None if now.calibrating else LastUse(use.asked, use.ran, recipe, quantizers)
        return quantizers

    def _chosen(self) -> Choice:
        """Return what the recipe in force means for this layer; no quantizers where the recipe has the same for all."""
        recipe = state().compute
        if recipe is not None and recipe.by_name:
            return choose_once(recipe, self)
        return recipe, None

    def _record_use(self, asked: Recipe | None, recipe: Recipe | None) -> None:
        """Write down which recipe was asked for and which is this module's, and what delayed scaling has to update."""
        if isinstance(recipe, DelayedScaling):
            self.delayed_rule = recipe.rule()
        if exporting():  # an exported program has no side effects
            return
        self.recipe_use.asked = "none" if asked is None else asked.NAME
        self.recipe_use.ran = None if recipe is None or state().calibrating else recipe.NAME
        if isinstance(recipe, DelayedScaling):
            self._record_touched()

    def _record_touched(self) -> None:
        """Have the exit of the outermost region update this module's scales, where this pass records amaxes: not in an
        evaluation or a recomputation."""
        if not compiling() and recomputing():
            return
        s, use = state(), self.recipe_use.in_thread.now
        if not s.calibrating and not self.training:
            return
        if not compiling():  # of a graph, the exit of the region sees it
            self.recipe_use.refuse_two_regions(self)
        if s.calibrating:
            use.calibrated = True
        else:
            use.recorded = True
        if s.touched is not None and self not in s.touched:
            s.touched.append(self)

    def calibrating(self) -> bool:
        """Whether amaxes of what this layer uses in high precision are to be recorded: in
        `autocast(calibrating=True)`, if its recipe is DelayedScaling."""
        return state().calibrating and isinstance(self._chosen()[0], DelayedScaling)

    def calibration_amax(self, role: str, gemm_index: int | None = None) -> Tensor:
        """Return what to `update_amax_` while `calibrating`, [] of one GEMM or [G] of all (None). In a
        recomputation it is a tensor that nobody reads, so that the operations repeat the first run's."""
        row = self.fp8_amax[ROLES.index(role)]
        if not compiling() and recomputing():
            row = scratch_like(row)
        return row if gemm_index is None else row[gemm_index]

    def calibrate(self, role: str, amax: Tensor, gemm_index: int | None = None) -> None:
        """Record an amax, [] or one per GEMM [G], while `calibrating`. gemm_index: of the one meant; None: all."""
        if self.calibrating():
            update_amax_(self.calibration_amax(role, gemm_index), amax)

    def live_state(self, quantizers: GemmQuantizers) -> QuantizerState:
        """Return the live tensors that a forward pass with `quantizers` needs."""
        now, traced = THREAD.now, torch.compiler.is_compiling() and compiling()
        scale = amax = gradient = log = statistics = grad_statistics = key = None
        if self.delayed_rule is not None:
            scale = self.fp8_scale
            # evaluation uses the scales and leaves no trace in them
            amax = self.fp8_amax if self.training else None
            gradient = self.fp8_gradient if self.training else self.fp8_gradient.clone()
            if traced:
                log = self.fp8_gradient_log if self.training else self.fp8_gradient_log.clone()
                untracked_side_effect(setattr, self, "gradients_logged", True)
        if now.statistics and self.training and quantizers is not HIGH_PRECISION:
            statistics, grad_statistics = self.fp8_statistics, self.fp8_grad_statistics
        if quantizers.needs_key and torch.is_grad_enabled():
            key = self.fp8_rng_state
            # a new tensor: a compiled backward pass reads what the graph was given, not a copy made in it. Made in a
            # recomputation, too: selective checkpointing finds what it saved by counting operations
            moved_on = torch.stack((key[0], key[1] + 1))
            if traced:
                untracked_side_effect(setattr, self, "fp8_rng_state", moved_on)
            elif not (now.runs and recomputing()):
                self.fp8_rng_state = moved_on
        live = QuantizerState(scale, amax, gradient, statistics, grad_statistics, key, log)
        if not traced:
            hooks = _saved_tensors_hooks(True)
            if hooks and (key is not None or (amax is not None and torch.is_grad_enabled())):
                refuse_without_contexts(hooks[0])
            return same_as_first_run(live) if now.runs else live
        if scale is not None or key is not None:
            refuse_around_a_graph()
        return live

    def cached_weight(
        self,
        weights: tuple[Tensor, ...],
        is_first_microbatch: bool | None,
        gemm_index: int | None = None,
    ) -> QuantizedTensor | None:
        """Return the weights quantized once per step, or None where they are stored quantized or nothing is cached.

        weights: one [out, in] or [G, out, in], or G of [out, in]. is_first_microbatch: True quantizes and caches,
        False returns what is cached, None (unless `microbatch` says otherwise) does neither. gemm_index: of the GEMM
        meant, None for all together; each has its own. Where `microbatch(noop=...)` is nonzero, what is cached
        stays. False where nothing is cached yet quantizes and caches, as True does. Raises ValueError after a change of
        recipe, RuntimeError in a compiled graph that would have to cache.
        """
        first = state().first_microbatch if is_first_microbatch is None else is_first_microbatch
        quantizers = None if first is None or isinstance(weights[0], QuantizedTensor) else self.gemm_quantizers()
        if first is None or quantizers is None:
            return None
        if not compiling():
            quantizer, make = quantizers.weight, update_cached_weight if first else cached_weight
            return once_per_checkpoint(lambda: make(self, quantizer, weights, gemm_index))
        if first:
            raise RuntimeError(CANNOT_CACHE)
        return cached_weight(self, quantizers.weight, weights, gemm_index)

    def gemm_weights(self) -> dict[int | None, tuple[Any, ...]]:
        """Return the weights of every GEMM by its number, as `cached_weight` takes them."""
        return {index: (getattr(self, name),) for index, name in enumerate(self.weight_names())}


class GemmModule(QuantizedModule):
    """fuse_wgrad_accumulation: weight gradients are added to `weight.main_grad` in place and `weight.grad` stays None,
    or becomes zeros where a wrapper waits for it (see `gemm.wgrad`); a call with `is_first_microbatch=True`
    writes them there instead, so that nobody has to zero it. delay_wgrad_compute: backward leaves weight gradients out
    until `backward_dw()`. save_original_input: save the input as it is for wgrad and quantize it in the backward pass:
    this saves memory where several layers share it."""

    fuse_wgrad_accumulation: bool
    save_original_input: bool
    _later: list[Callable[[], None]] | None
    wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]]

    def __init__(
        self,
        num_gemms: int,
        name: str,
        gradients: WeightGradients,
    ) -> None:
        super().__init__(num_gemms, name)
        vars(self).update(  # see `RecipeStateModule`
            fuse_wgrad_accumulation=gradients.fuse_wgrad_accumulation,
            save_original_input=gradients.save_original_input,
            _later=[] if gradients.delay_wgrad_compute else None,
            wgrad_accumulation_and_reduce_hooks=[],
        )

    def complete_state(self) -> None:
        super().complete_state()
        for name in self.weight_names() if self.need_backward_dw() else ():
            getattr(self, name).skip_backward_post_hook = True  # wrappers wait for `backward_dw` then, see `wgrad`

    return_bias = return_layernorm_output = False  # layers that have these options set them

    def results(
        self, y: Tensor, bias: Tensor | None, normed: Tensor | None = None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return y, or with it what the layer was told to return: its bias, in y's dtype, and the normed input."""
        found: tuple[Tensor | None, ...] = (y,)
        if self.return_bias:
            found += (None if bias is None else bias.to(y.dtype),)
        if self.return_layernorm_output:
            found += (normed,)
        return found if len(found) > 1 else y

    @property
    def ran_plainly(self) -> bool:
        """Whether the last call was in high precision and outside of all regions, and weight gradients are made as
        usual: another one there has nothing to choose or to write down, and `gemm_call` returns None."""
        use = self.recipe_use
        last = use.last
        if last is None or last.recipe is not None or last.quantizers is not None:
            return False
        if self.fuse_wgrad_accumulation or self._later is not None or self.save_original_input:
            return False
        return last.asked == use.asked and last.ran == use.ran

    def gemm_call(self, is_first_microbatch: bool | None, gemm_index: int | None = None) -> GemmCall | None:
        """Return what the functions of a GEMM need of this module for one call: what the recipe in force means for it,
        its live state and what it caches; None for plain high precision. gemm_index: None where one call is of all
        GEMMs."""
        now, traced = THREAD.now, torch.compiler.is_compiling() and compiling()
        first = now.first_microbatch if is_first_microbatch is None else is_first_microbatch
        cached = None if first is None else self.cached_weight(self.gemm_weights()[gemm_index], first, gemm_index)
        quantizers = self._quantizers(now, traced)
        options = DEFAULT_OPTIONS
        if self.fuse_wgrad_accumulation or self._later is not None or self.save_original_input:
            options = self.gemm_options(*self.gemm_weights()[gemm_index], first=is_first_microbatch)
        amaxes = None
        if now.calibrating and self.calibrating():
            amaxes = self.calibration_amax("input", gemm_index), self.calibration_amax("weight", gemm_index)
        if quantizers is None and options.wgrad is None:
            return None if amaxes is None else GemmCall(None, NO_STATE, None, amaxes)
        quantizers = HIGH_PRECISION if quantizers is None else quantizers
        # live tensors are for delayed scaling, random bits and statistics, and for a checkpoint that has to know
        needed = self.delayed_rule is not None or quantizers.needs_key or now.statistics or (now.runs and not traced)
        live = self.live_state(quantizers) if needed else NO_STATE
        return GemmCall(GemmConfig(quantizers, options, gemm_index), live, cached, amaxes)

    def gemm_options(self, *weights: nn.Parameter, first: bool | None = None) -> GemmOptions:
        """Return how the gradients of `weights` are to be made, of several together. first: `is_first_microbatch` of
        this call; where it is True a main gradient is written to and not added to."""
        if not self.fuse_wgrad_accumulation and self._later is None:
            return GemmOptions(True) if self.save_original_input else DEFAULT_OPTIONS
        return GemmOptions(
            self.save_original_input, weight_gradient(weights, self.fuse_wgrad_accumulation, self._later, first is True)
        )

    def need_backward_dw(self) -> bool:
        """Whether backward passes leave weight gradients to `backward_dw`."""
        return self._later is not None

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Have `backward_dw` call a function without arguments once the gradients are there: what wrappers such as
        Megatron's register for weights that have `skip_backward_post_hook`, instead of autograd's hook."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients that backward left out, oldest first, then call what was registered for it;
        nothing is done where none were left out. Raises RuntimeError where the input or the gradient of the output, of
        which one that is not quantized is saved as it is, was written to since the backward pass, and of weights that
        FSDP2 shards."""
        if not self._later:
            return
        if sharded(self.parameters(recurse=False)):
            raise RuntimeError(
                "FSDP2 has sharded the weights again and reduces no gradient that comes after the backward pass; "
                "allowed: layers built without delay_wgrad_compute"
            )
        while self._later:
            self._later.pop(0)()
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()
