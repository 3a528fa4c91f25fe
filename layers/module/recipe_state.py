"""The live state of the layers with GEMMs: plain tensors beside the parameters, saved with them where a recipe uses it.

G GEMMs; the 3 roles are input, weight and grad_output:

    fp8_scale [3, G], fp8_history [L, 3, G]           delayed scaling, see `delayed`
    fp8_amax [2, G]                                   what its forward passes have recorded since the last update
    fp8_gradient [3, G]                               of gradients, the amax recorded since then, the scale and the
                                                      generation, how many updates there were
    fp8_gradient_log, fp8_gradient_seen [2, LOG, G]   of gradients, the amaxes that graphs recorded, now and at the last
                                                      update
    fp8_outer_scale, fp8_outer_amax [2], fp8_outer_history [length - 1, 2]   of quantized outputs and input gradients
    fp8_statistics [S, 2, 5], fp8_grad_statistics     of S GEMMs apart, see `quantization_statistics`; [S, 5]
    fp8_rng_state [2] int64                           (seed, counter) of stochastic rounding

It is tiny and always there, so that a compiled graph finds it in its first call. It never lives on the meta device.
Backward passes read and write separate tensors. They may be written between the forward and the backward pass of
another call; the compiler supports that for a tensor that no forward pass writes.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import constant_when_traced
from te_models.suggestions import shown

from ..quantizer.delayed import GENERATIONS, LOG, ROLES, STATISTICS, logged_amax
from ..quantizer.state import STREAMS, default_seed
from ..recipe.base import Recipe
from ..recipe.context import state
from ..recipe.recipe_use import RecipeUse, live_modules, recipe_for_layer, register_layer
from ..recipe.recipes import DelayedRule, DelayedScaling
from ..tensor.quantized_tensor import module_conversion
from .extra_state import (
    EXTRA_STATE_INSTEAD,
    KEY,
    holds_something,
    leave_extra_state,
    tensors_as_bytes,
    tensors_from_bytes,
    written_here,
)
from .weight_cache import move_cached_weights

_DELAYED_NAMES = ("fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_history")
_OUTER_NAMES = ("fp8_outer_scale", "fp8_outer_amax", "fp8_outer_history")
_SAVED_NAMES = (*_DELAYED_NAMES, *_OUTER_NAMES, "fp8_rng_state")
_PLACED_NAMES = (
    "fp8_gradient",
    "fp8_gradient_log",
    "fp8_gradient_seen",
    "_fp8_scale",
    "fp8_amax",
    "_history",
    *_OUTER_NAMES,
    "fp8_rng_state",
    "fp8_statistics",
    "fp8_grad_statistics",
)


class RecipeStateModule(nn.Module):
    """Base of `QuantizedModule`: the live state, where it lies, and how it is saved. num_gemms: how many scales each
    role has; name: see `QuantizedModule`."""

    STATISTICS_SLOTS: ClassVar[tuple[str, ...]] = ("",)  # GEMMs with separate statistics, by suffix of the name
    recipe_use: RecipeUse
    kind: str  # as recipes know it; `fully_shard` makes another class of the module
    state_in_state_dict: bool  # False: `recipe_state(model)` alone gives it
    reduce_amax: bool  # False: other ranks have other GEMMs here, so delayed scaling reduces no amaxes
    delayed_rule: DelayedRule | None
    _history: Tensor | None  # of zeros where only graphs know of it, see `fp8_history`
    outer_used: bool  # whether outputs or input gradients were quantized under delayed scaling
    gradients_logged: bool  # whether there is a graph whose backward pass records
    fp8_amax: Tensor
    fp8_gradient: Tensor
    fp8_gradient_log: Tensor
    fp8_gradient_seen: Tensor
    fp8_outer_scale: Tensor
    fp8_outer_amax: Tensor
    fp8_outer_history: Tensor | None
    fp8_statistics: Tensor
    fp8_grad_statistics: Tensor
    fp8_rng_state: Tensor
    _ordinal: int
    _seed: int
    _stream_prepared: bool

    def __init__(self, num_gemms: int = 1, name: str = "") -> None:
        super().__init__()
        seed = default_seed()
        scale = torch.ones(len(ROLES), num_gemms, dtype=torch.float32, device=real_default_device())
        amaxes, log, slots = (
            scale.new_zeros(2, num_gemms),
            scale.new_zeros(2, LOG, num_gemms),
            len(self.STATISTICS_SLOTS),
        )
        # all at once: a module that sets an attribute looks each time whether that is a parameter, a buffer or a module
        vars(self).update(
            recipe_use=RecipeUse(),
            kind=type(self).__name__,
            _name=name or "",
            state_in_state_dict=True,
            reduce_amax=True,
            delayed_rule=None,
            _history=None,
            _has_history=False,
            _fp8_scale=scale,
            fp8_amax=amaxes,
            fp8_gradient=torch.stack((amaxes[0], scale[2], amaxes[0])),
            fp8_gradient_log=log,
            fp8_gradient_seen=torch.zeros_like(log),
            fp8_outer_scale=scale.new_ones(2),
            fp8_outer_amax=scale.new_zeros(2),
            fp8_outer_history=None,
            outer_used=False,
            gradients_logged=False,
            fp8_statistics=scale.new_zeros(slots, 2, len(STATISTICS)),
            fp8_grad_statistics=scale.new_zeros(slots, len(STATISTICS)),
            fp8_rng_state=scale.new_tensor((seed * STREAMS, 0), dtype=torch.int64),
            _seed=seed,
            _stream_prepared=False,
        )
        # last: regions of other threads look from now on at what it is made of
        vars(self)["_ordinal"] = register_layer(self)
        self.register_load_state_dict_pre_hook(leave_extra_state)

    @property
    def name(self) -> str:
        """The qualified name, "" for a module without one."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        self.recipe_use.forget_choices()

    @property
    def fp8_scale(self) -> Tensor:
        """The scale of each role, [3, G]. What is written to it is the gradients' scale, too, from now on."""
        return self._fp8_scale

    @fp8_scale.setter
    def fp8_scale(self, scale: Tensor) -> None:
        self._fp8_scale = scale
        self.fp8_gradient = torch.stack((self.fp8_gradient[0], scale[2], self.fp8_gradient[2]))

    @property
    def fp8_history(self) -> Tensor | None:
        """The earlier amaxes, [length - 1, 3, G], newest first; None before there are any. (A graph in which a region
        ends reads zeros then, so that it is the same graph as in the next call.)"""
        return self._history if self._has_history else None

    @fp8_history.setter
    def fp8_history(self, history: Tensor | None) -> None:
        self._history, self._has_history = history, history is not None

    @property
    def fp8_grad_amax(self) -> Tensor:
        """The amax of gradients that was recorded since the last update, [G]; what is written to it counts."""
        if self.gradients_logged:
            self.fp8_gradient.data[0].copy_(self.recorded_gradient_amax())
            self.fp8_gradient_seen = self.fp8_gradient_log.clone()
        return self.fp8_gradient[0]

    def recorded_gradient_amax(self) -> Tensor:
        """Return the amax [G] of gradients that backward passes, eager or in graphs, have recorded."""
        if not (compiling() or self.gradients_logged):
            return self.fp8_gradient[0]
        return torch.maximum(self.fp8_gradient[0], logged_amax(self.fp8_gradient_log, self.fp8_gradient_seen))

    def move_scales_on(self, scale: Tensor, history: Tensor) -> None:
        """Take the scales [3, G] and the history of an update, and begin to record again."""
        # a new scale, because a backward pass that is still to come needs the old one; the same tensor for gradients,
        # because that pass will read and write it
        self._fp8_scale, self._history, self._has_history = scale, history, True
        self.fp8_amax.zero_()
        generation = self.fp8_gradient[2]
        if compiling() or self.gradients_logged:
            generation = torch.remainder(generation + 1, GENERATIONS)
            self.fp8_gradient_seen = self.fp8_gradient_log.clone()
        gradient = torch.stack((torch.zeros_like(scale[2]), scale[2], generation))
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

        It moves to where the parameters are. If the construction drew nothing from torch's CPU generator (on another
        device, or without random values), the next module would find the generator in the same state. The stream of
        random bits then follows from how many modules were built before, so that each module has another."""
        if default_seed() == self._seed:
            self.fp8_rng_state[0] += 1 + self._ordinal % (STREAMS - 1)
        self.place_state(self._first_parameter().device)  # type: ignore[union-attr]

    def _first_parameter(self) -> nn.Parameter | None:
        """Return `next(self.parameters(), None)`, of these parameters first: torch's way there takes microseconds."""
        for parameter in self._parameters.values():
            if parameter is not None:
                return parameter
        return next(self.parameters(), None)

    def place_state(self, device: torch.device) -> None:
        """Move the live state to a device, unless that is the meta device, where it never lives."""
        for name in () if device.type == "meta" else _PLACED_NAMES:
            value = getattr(self, name)
            if value is not None and value.device != device:  # asked first: setting an attribute takes microseconds
                setattr(self, name, value.to(device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        marks = {name: dict(vars(p)) for name, p in self._parameters.items() if type(p) is nn.Parameter}
        with module_conversion():
            super()._apply(fn, recurse)
        for name, attributes in marks.items():  # coming from the meta device, parameters are new objects
            vars(self._parameters[name]).update(attributes)
        parameter = self._first_parameter()
        # without parameters, what happens to some other tensor tells
        self.place_state((fn(self.fp8_scale.new_empty(0)) if parameter is None else parameter).device)
        if parameter is not None:
            move_cached_weights(self, parameter.device, parameter.dtype)
        return self

    def delayed_history(self, length: int) -> Tensor:
        """Return the earlier amaxes, [length, 3, G], cut or filled up with zeros to the length asked."""
        shape = self.fp8_scale.shape
        if compiling():
            _histories_before_tracing(length)
        history = self._history
        if history is None:
            return self.fp8_scale.new_zeros(length, *shape)
        if history.shape[0] == length:
            return history
        return torch.cat((history[:length], history.new_zeros(max(0, length - history.shape[0]), *shape)))

    def outer_history(self, length: int) -> Tensor:
        """Return `delayed_history`, [length, 2], of the quantized outputs and input gradients."""
        history = self.fp8_outer_scale.new_zeros(0, 2) if self.fp8_outer_history is None else self.fp8_outer_history
        history = history[:length]
        return torch.cat((history, history.new_zeros(length - history.shape[0], 2)))

    def recipe_state(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs, by attribute name; empty if no recipe with state has run and none
        was prepared for."""
        names: tuple[str, ...] = ()
        if self.fp8_history is not None:
            names += _DELAYED_NAMES
        if self.fp8_outer_history is not None:
            names += _OUTER_NAMES
        seed, counter = self.fp8_rng_state.tolist()
        if counter != 0 or seed >= 0 or self._stream_prepared:  # in use, or given by set_rounding_seed
            names += ("fp8_rng_state",)
        return {name: getattr(self, name) for name in names}

    @property
    def draws_random_bits(self) -> bool:
        """Whether stochastic rounding has drawn from this layer's stream, or will under the recipe that
        `prepare_recipe_state` was told."""
        return self._stream_prepared or int(self.fp8_rng_state[1]) != 0

    def prepare_recipe_state(self, recipe: Recipe) -> None:
        """Have `recipe_state` give the state of this layer under `recipe`, before its first step, too."""
        own, quantizers = recipe_for_layer(recipe, self)
        if isinstance(own, DelayedScaling):
            held = 0 if self.fp8_history is None else len(self.fp8_history)  # perhaps another recipe's, and longer
            self.fp8_history = self.delayed_history(max(held, own.amax_history_len - 1))
        if quantizers is not None and quantizers.grad_output.needs_key():
            self._stream_prepared = True

    def set_recipe_state(self, values: dict[str, Tensor]) -> None:
        """Take over what `recipe_state` gave. Names that are absent keep their values. Raises ValueError."""
        for name, value in values.items():
            if name not in _SAVED_NAMES:
                raise ValueError(f"{shown(name)} is not a name of recipe state; allowed: {', '.join(_SAVED_NAMES)}")
            histories = {"fp8_history": self.fp8_scale, "fp8_outer_history": self.fp8_outer_scale}
            expected = histories[name] if name in histories else getattr(self, name)
            shape = value.shape[1:] if name in histories else value.shape
            if shape != expected.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(expected.shape)}")
            if value.is_floating_point() != expected.is_floating_point():
                raise ValueError(f"{name} has dtype {value.dtype}; expected {expected.dtype}")
            with torch.inference_mode(mode=False):  # training steps write to it, whatever mode it is loaded in
                own = torch.empty_like(value, device=expected.device, dtype=expected.dtype).copy_(value)
                if name == "fp8_grad_amax":
                    self.fp8_gradient = torch.stack((own, *self.fp8_gradient[1:]))
                    self.fp8_gradient_seen = self.fp8_gradient_log.clone()
                else:
                    setattr(self, name, own)
            self.outer_used |= name in _OUTER_NAMES

    def get_extra_state(self) -> Tensor:
        """Return `recipe_state` as bytes, uint8 [n] on the CPU, [0] without a state: for scripts that save it under
        `_extra_state`. A state dict of ours has its tensors by name, and no such key."""
        state_of_recipe = self.recipe_state()
        return tensors_as_bytes(state_of_recipe) if state_of_recipe else torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor | None) -> None:
        """Take over what `get_extra_state` returned; nothing where it is empty. Raises ValueError for anything else: no
        pickle is opened."""
        if not holds_something(state):
            return
        if state is None or not written_here(state):
            raise ValueError(
                "the extra state is not one that get_extra_state returned here, and what others pickled "
                f"is not opened; load_state_dict takes the weights beside it, and {EXTRA_STATE_INSTEAD}"
            )
        self.set_recipe_state(tensors_from_bytes(state))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + KEY]
        for name, value in self.recipe_state().items() if self.state_in_state_dict else ():
            destination[prefix + name] = value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        present = {name: state_dict.pop(prefix + name) for name in _SAVED_NAMES if prefix + name in state_dict}
        try:
            self.set_recipe_state(present)
        except ValueError as error:
            args[-1].append(f"{prefix}{error}")
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + KEY in args[2]:  # torch misses it
            args[2].remove(prefix + KEY)


@constant_when_traced
def _histories_before_tracing(length: int) -> bool:
    """Give all layers that have no history one of zeros, when a graph is traced and not in it."""
    for module in live_modules():
        if module._history is None:
            module._history = module.fp8_scale.new_zeros(length, *module.fp8_scale.shape)
    return True


def real_default_device() -> torch.device:
    """Return torch's default device, or the CPU where that is the meta device."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


M = TypeVar("M", bound="RecipeStateModule")
_INSTEAD = "allowed: DistributedDataParallel, a process for each device"


def as_replica(copied: M) -> M:
    """Return a copy that `nn.DataParallel` has made, as one that computes in high precision, and under a recipe without
    state whose region the model's own forward opens. RuntimeError where a region is in force now: not in its threads.

    The copy lives for one call, in another thread, perhaps on another device. What it would write is lost or races with
    the other copies, so it refuses the recipes, the calibration and the statistics that write.
    """
    if state().compute is not None:
        raise RuntimeError(
            "nn.DataParallel runs its copies in threads where the autocast region around it is not in force; allowed: "
            "a region inside the model's forward, or DistributedDataParallel, a process for each device"
        )
    cls: Any = type(copied)
    values = copied.__dict__
    values["recipe_use"], values["delayed_rule"] = RecipeUse(), None

    def live_state(quantizers: Any) -> Any:
        live = cls.live_state(copied, quantizers)
        if any(tensor is not None for tensor in live):
            raise RuntimeError(
                "a copy made by nn.DataParallel keeps no state, which DelayedScaling, stochastic rounding in training "
                f"and collect_statistics need; {_INSTEAD}"
            )
        return live

    def calibrating() -> bool:
        if cls.calibrating(copied):
            raise RuntimeError(f"a copy made by nn.DataParallel keeps no state, which a calibration needs; {_INSTEAD}")
        return False

    values["live_state"], values["calibrating"] = live_state, calibrating
    return copied
