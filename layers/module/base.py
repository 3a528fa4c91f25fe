"""What the layers with GEMMs have in common: which quantizers are in force, and the live state that some need.

State, kept as plain tensors beside the parameters (G GEMMs; the 3 roles are input, weight and grad_output):

    fp8_scale [3, G], fp8_history [L, 3, G]           delayed scaling, see `delayed`
    fp8_amax [2, G]                                   what its forward passes have recorded since the last update
    fp8_gradient [2, G]                               of gradients, the amax recorded since then and the scale
    fp8_statistics [S, 2, 5], fp8_grad_statistics     of S GEMMs apart, see `quantization_statistics`; [S, 5]
    fp8_rng_state [2] int64                           (seed, counter) of stochastic rounding

It is tiny and always there, so that a compiled graph finds it in its first call. It never lives on the meta device.
What backward passes read and write has tensors of its own: those may be written between the forward and the backward
pass of another call, which the compiler supports for a tensor that no forward pass writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import exporting

from ..quantizer.delayed import ROLES, STATISTICS, update_amax_
from ..quantizer.state import NO_STATE, STREAMS, QuantizerState, default_seed
from ..recipe.activation_checkpoint import once, recomputing, refuse_around_a_graph, same_as_first_run, scratch_like
from ..recipe.base import HIGH_PRECISION, GemmQuantizers, Recipe
from ..recipe.context import state
from ..recipe.recipe_use import Choice, LastUse, RecipeUse, choose, register_layer, untracked_side_effect
from ..recipe.recipes import DelayedRule, DelayedScaling
from ..te_arguments import leave_extra_state
from ..tensor.quantized_tensor import QuantizedTensor, module_conversion
from .replicas import as_replica
from .weight_cache import cached_weight, move_cached_weights, update_cached_weight

_DELAYED_NAMES = ("fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_history")
_SAVED_NAMES = (*_DELAYED_NAMES, "fp8_rng_state")
_PLACED_NAMES = (
    "fp8_gradient",
    "_fp8_scale",
    "fp8_amax",
    "fp8_history",
    "fp8_rng_state",
    "fp8_statistics",
    "fp8_grad_statistics",
)


class QuantizedModule(nn.Module):
    """Base of Linear, GroupedLinear, LayerNormLinear and LayerNormMLP. num_gemms: how many scales each role has; name:
    the qualified name that per-module rules and custom recipes see (`name_modules` sets it)."""

    STATISTICS_SLOTS: ClassVar[tuple[str, ...]] = ("",)  # GEMMs with statistics of their own, by suffix of the name

    def __init__(self, num_gemms: int = 1, name: str = "") -> None:
        super().__init__()
        self.recipe_use = RecipeUse()
        self.kind = type(self).__name__  # as recipes know it; `fully_shard` makes another class of the module
        self.name = name or ""  # Transformer Engine's None
        self.reduce_amax = True  # False: other ranks have other GEMMs here, so delayed scaling reduces no amaxes
        self.delayed_rule: DelayedRule | None = None
        self.fp8_history: Tensor | None = None
        self._fp8_scale = torch.ones(len(ROLES), num_gemms, device=_real_default_device())
        self.fp8_amax = torch.zeros_like(self.fp8_scale[:2])
        self.fp8_gradient = torch.stack((self.fp8_amax[0], self.fp8_scale[2]))
        self.fp8_statistics = self.fp8_scale.new_zeros(len(self.STATISTICS_SLOTS), 2, len(STATISTICS))
        self.fp8_grad_statistics = self.fp8_scale.new_zeros(len(self.STATISTICS_SLOTS), len(STATISTICS))
        self.register_load_state_dict_pre_hook(leave_extra_state)
        self._ordinal = register_layer(self)
        self._seed = default_seed()
        self._stream_prepared = False
        self.fp8_rng_state = self.fp8_scale.new_tensor((self._seed * STREAMS, 0), dtype=torch.int64)

    @property
    def name(self) -> str:
        """The qualified name, "" where there is none."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        self.recipe_use.forget_choices()

    @property
    def fp8_scale(self) -> Tensor:
        """The scale of each role, [3, G]. What is written to it is that of gradients, too, from now on."""
        return self._fp8_scale

    @fp8_scale.setter
    def fp8_scale(self, scale: Tensor) -> None:
        self._fp8_scale = scale
        self.fp8_gradient = torch.stack((self.fp8_gradient[0], scale[2]))

    @property
    def fp8_grad_amax(self) -> Tensor:
        """The amax of gradients that was recorded since the last update, [G]."""
        return self.fp8_gradient[0]

    def move_scales_on(self, scale: Tensor, history: Tensor) -> None:
        """Take the scales [3, G] and the history of an update, and begin to record anew."""
        # a new scale, because a backward pass that is still to come needs the old one; the same tensor for gradients,
        # because that pass will read and write it
        self._fp8_scale, self.fp8_history = scale, history
        self.fp8_amax.zero_()
        gradient = torch.stack((torch.zeros_like(scale[2]), scale[2]))
        if compiling():
            self.fp8_gradient.copy_(gradient)
        else:
            # autograd need not see that it changed: a backward pass to come wants it as it is then
            self.fp8_gradient.data.copy_(gradient)

    def __setstate__(self, values: dict[str, Any]) -> None:
        super().__setstate__(values)
        self._ordinal = register_layer(self)  # copy.deepcopy comes this way, past __init__

    def complete_state(self) -> None:
        """Finish the live state of a layer whose parameters are made; layers call it at the end of their construction.

        It moves to where the parameters are. And where the construction drew nothing from torch's CPU generator (on
        another device, or without random values), whose state then is also the next module's, the stream of random
        bits becomes one of this module's own, which follows from how many modules were built before."""
        if default_seed() == self._seed:
            self.fp8_rng_state[0] += 1 + self._ordinal % (STREAMS - 1)
        self._place_state(next(self.parameters()).device)

    def _place_state(self, device: torch.device) -> None:
        """Move the live state to a device, unless that is the meta device, where it never lives."""
        for name in () if device.type == "meta" else _PLACED_NAMES:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.to(device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        marks = {name: dict(vars(p)) for name, p in self._parameters.items() if type(p) is nn.Parameter}
        with module_conversion():
            super()._apply(fn, recurse)
        for name, attributes in marks.items():  # coming from the meta device, parameters are new objects
            vars(self._parameters[name]).update(attributes)
        parameter = next(self.parameters(), None)
        # without parameters, what happens to some other tensor tells
        self._place_state((fn(self.fp8_scale.new_empty(0)) if parameter is None else parameter).device)
        if parameter is not None:
            move_cached_weights(self, parameter.device, parameter.dtype)
        return self

    def _replicate_for_data_parallel(self) -> Self:
        return as_replica(super()._replicate_for_data_parallel())

    def weight_names(self) -> tuple[str, ...]:
        """Return the names of the weight parameters."""
        return ("weight",)

    # --- what is in force ------------------------------------------------------------------------------------------

    def quantizers(self) -> GemmQuantizers | None:
        """Return this module's quantizers under the recipe in force; None: high precision."""
        now, use = state(), self.recipe_use
        traced = compiling()
        if not traced:
            last = use.last
            as_before = last is not None and last.recipe is now.compute and last[:2] == (use.asked, use.ran)
            if last is not None and as_before and not now.calibrating:
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
            return (self.recipe_use.in_thread.now.chosen if state().chosen else None) or choose(recipe, self)
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
        recomputation it is a tensor that nobody reads, so that the operations are those of the first run."""
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
        now, traced = state(), compiling()
        if self.delayed_rule is None and not quantizers.needs_key and not now.statistics and (traced or not now.runs):
            return NO_STATE
        scale = amax = gradient = statistics = grad_statistics = key = None
        if self.delayed_rule is not None:
            scale = self.fp8_scale
            # evaluation uses the scales and leaves no trace in them
            amax = self.fp8_amax if self.training else None
            gradient = self.fp8_gradient if self.training else self.fp8_gradient.clone()
        if now.statistics and self.training and quantizers is not HIGH_PRECISION:
            statistics, grad_statistics = self.fp8_statistics, self.fp8_grad_statistics
        if quantizers.needs_key and torch.is_grad_enabled():
            key = self.fp8_rng_state
            # a new tensor: a compiled backward pass reads what the graph was given, not a copy made in it. Made in a
            # recomputation, too: selective checkpointing finds what it kept by counting operations
            moved_on = torch.stack((key[0], key[1] + 1))
            if traced or not recomputing():
                untracked_side_effect(setattr, self, "fp8_rng_state", moved_on)
        live = QuantizerState(scale, amax, gradient, statistics, grad_statistics, key)
        if not traced:
            return same_as_first_run(live)
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
        stays. Raises RuntimeError where nothing is cached, ValueError after a change of recipe.
        """
        first = state().first_microbatch if is_first_microbatch is None else is_first_microbatch
        quantizers = None if first is None or isinstance(weights[0], QuantizedTensor) else self.quantizers()
        if first is None or quantizers is None:
            return None
        if not compiling():
            quantizer, make = quantizers.weight, update_cached_weight if first else cached_weight
            return once(lambda: make(self, quantizer, weights, gemm_index))
        if first:
            raise RuntimeError(
                "a compiled graph cannot keep a quantized weight: call cache_weights(model) before the step's first "
                "micro-batch, and run all of them with is_first_microbatch=False or microbatch(first=False)"
            )
        return cached_weight(self, quantizers.weight, weights, gemm_index)

    def gemm_weights(self) -> list[tuple[tuple[Tensor, ...], int | None]]:
        """Return the weights of every GEMM and its number, as `cached_weight` takes them."""
        return [((getattr(self, name),), index) for index, name in enumerate(self.weight_names())]

    # --- the state of delayed scaling ------------------------------------------------------------------------------

    def delayed_history(self, length: int) -> Tensor:
        """Return the earlier amaxes, [length, 3, G], cut or filled up with zeros to the length asked."""
        shape = self.fp8_scale.shape
        history = self.fp8_history
        if history is None:
            return self.fp8_scale.new_zeros(length, *shape)
        if history.shape[0] == length:
            return history
        return torch.cat((history[:length], history.new_zeros(max(0, length - history.shape[0]), *shape)))

    def recipe_state(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs, by attribute name; empty if no recipe with state has run and none
        was prepared for."""
        names: tuple[str, ...] = ()
        if self.fp8_history is not None:
            names += _DELAYED_NAMES
        seed, counter = self.fp8_rng_state.tolist()
        if counter != 0 or seed >= 0 or self._stream_prepared:  # in use, or given by set_rounding_seed
            names += ("fp8_rng_state",)
        return {name: getattr(self, name) for name in names}

    def prepare_recipe_state(self, recipe: Recipe) -> None:
        """Have `recipe_state` give what this layer keeps under `recipe`, before its first step, too."""
        own, quantizers = choose(recipe, self)
        if isinstance(own, DelayedScaling):
            self.fp8_history = self.delayed_history(own.amax_history_len - 1)
        if quantizers is not None and quantizers.grad_output.needs_key():
            self._stream_prepared = True

    def set_recipe_state(self, values: dict[str, Tensor]) -> None:
        """Take over what `recipe_state` gave. Names that are absent keep their values. Raises ValueError."""
        for name, value in values.items():
            if name not in _SAVED_NAMES:
                raise ValueError(f"{name!r} is not a name of recipe state; allowed: {', '.join(_SAVED_NAMES)}")
            expected = self.fp8_scale if name == "fp8_history" else getattr(self, name)
            shape = value.shape[1:] if name == "fp8_history" else value.shape
            if shape != expected.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(expected.shape)}")
            if value.is_floating_point() != expected.is_floating_point():
                raise ValueError(f"{name} has dtype {value.dtype}; expected {expected.dtype}")
            with torch.inference_mode(mode=False):  # training steps write to it, whatever mode it is loaded in
                own = torch.empty_like(value, device=expected.device, dtype=expected.dtype).copy_(value)
                if name == "fp8_grad_amax":
                    self.fp8_gradient = torch.stack((own, self.fp8_scale[2]))
                else:
                    setattr(self, name, own)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.recipe_state().items():
            destination[prefix + name] = value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        present = {name: state_dict.pop(prefix + name) for name in _SAVED_NAMES if prefix + name in state_dict}
        try:
            self.set_recipe_state(present)
        except ValueError as error:
            args[-1].append(f"{prefix}{error}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _real_default_device() -> torch.device:
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device
