"""`fp8_meta` and `quantizers` of layers, and recipe states, in the form that programs of Transformer Engine read.

A layer keeps its state by role, see `recipe_state`; there it is by slot: in the forward pass 3 g + (0: input, 1:
weight, 2: output) of GEMM g, in the backward pass 2 g + (0: grad_output, 1: grad_input). The last of each is used under
fp8_output and fp8_grad alone; elsewhere it has the scale 1 and the history 0. Row 0 of a history [length, slots] is the
amax recorded since the last update, and the last row is the newest of the earlier ones.

What is read is a copy in that order, and cannot be written to in place; assigning `scale` or `amax_history` of a
state writes the layer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from te_models.suggestions import check_choice

from ..quantizer.delayed import ROLES, Float8Quantizer
from ..quantizer.state import QuantizerState, with_gradient_state, with_state
from ..recipe.base import Format, GemmQuantizers, QuantizerRole, Recipe
from ..recipe.context import state
from ..recipe.recipe_use import RecipeUse
from ..recipe.recipes import CustomRecipe, DelayedScaling, NVFP4BlockScaling
from ..tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from ..module.base import QuantizedModule

Mode = Literal["forward", "backward"]
SLOTS: dict[Mode, tuple[str | None, ...]] = {"forward": ("input", "weight", None), "backward": ("grad_output", None)}
"""The roles of one GEMM's slots; None: nothing is quantized there."""
_ROWS = {mode: [None if role is None else ROLES.index(role) for role in roles] for mode, roles in SLOTS.items()}
"""The rows of a layer's state that the slots are."""
KINDS: tuple[Mode, Mode] = ("forward", "backward")
"""The directions in the order of what is kept of quantized outputs and input gradients."""
KEYS: dict[str, Mode] = {"scaling_fwd": "forward", "scaling_bwd": "backward"}


class StateCopy(Tensor):
    """A copy of a layer's state that refuses writes in place: nobody would see them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise TypeError(
                f"{name} would write to a copy of a layer's state; assign to scale or amax_history of the recipe state"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(Tensor) if isinstance(found, StateCopy) else found


class RecipeState:
    """What a recipe needs for the slots of one direction. recipe, mode ("forward" or "backward"), num_quantizers,
    roles: the constructor's; dtype: what the slots are quantized to, where they share one."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        check_choice("mode", mode, SLOTS)
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"roles has {len(roles)} entries; allowed: {num_quantizers}, one per quantizer")
        self.recipe, self.num_quantizers, self.roles, self.device = recipe, num_quantizers, roles, device
        self.mode: Mode = mode

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """Return the state of a recipe: a `DelayedScalingRecipeState` with new tensors, or a state without tensors."""
        cls = DelayedScalingRecipeState if isinstance(recipe, DelayedScaling) else RecipeState
        return cls(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    @property
    def dtype(self) -> torch.dtype | None:
        """The FP8 dtype of this direction; None where the recipe has none."""
        fp8_format = getattr(self.recipe, "fp8_format", None)
        if not isinstance(fp8_format, Format) or isinstance(self.recipe, NVFP4BlockScaling):
            return None
        return fp8_format.dtype("input" if self.mode == "forward" else "grad_output")

    def _role_of(self, slot: int) -> str:
        role = self.roles[slot] if self.roles is not None else None
        kind = role.tensor_type if role is not None else None
        if kind not in ("input", "weight", "grad_output"):
            kind = SLOTS[self.mode][slot % len(SLOTS[self.mode])]
        return kind or ("input" if self.mode == "forward" else "grad_output")

    def _quantizer_role(self, slot: int) -> QuantizerRole:
        role = self.roles[slot] if self.roles is not None else None
        return QuantizerRole("linear", self._role_of(slot), "", "Linear") if role is None else role

    def make_quantizers(self) -> list[Any]:
        """Return one quantizer per slot, by its role, or by its place where it has none; of a CustomRecipe what its
        qfactory returns for the very role."""
        if isinstance(self.recipe, CustomRecipe):
            return [self.recipe.quantizer_for(self._quantizer_role(slot)) for slot in range(self.num_quantizers)]
        chosen: GemmQuantizers = self.recipe.quantizers("Linear", "")
        return [getattr(chosen, self._role_of(slot)).copy() for slot in range(self.num_quantizers)]


class DelayedScalingRecipeState(RecipeState):
    """scale: float32 [slots]; amax_history: [length, slots]. Of a layer (`fp8_meta`), see above; otherwise own tensors,
    in which the quantizers it makes record."""

    def __init__(self, recipe: Recipe, *, layer: QuantizedModule | None = None, **arguments: Any) -> None:
        super().__init__(recipe, **arguments)
        self._layer = layer
        if layer is None:
            device, length = self.device, recipe.amax_history_len  # type: ignore[attr-defined]
            self._scale = torch.ones(self.num_quantizers, dtype=torch.float32, device=device)
            self._history = torch.zeros(length, self.num_quantizers, dtype=torch.float32, device=device)

    @property
    def scale(self) -> Tensor:
        """The factors that slots are multiplied with before the cast."""
        if self._layer is None:
            return self._scale
        layer = self._layer
        outer = layer.fp8_outer_scale[KINDS.index(self.mode)] if layer.outer_used else 1.0
        return _by_slot(layer.fp8_scale, self.mode, outer).as_subclass(StateCopy)

    @scale.setter
    def scale(self, values: Tensor) -> None:
        if self._layer is None:
            self._scale = values
            return
        own = self._layer.fp8_scale.clone()
        _into_roles(own, values, self.mode)
        self._layer.fp8_scale = own

    @property
    def scale_inv(self) -> Tensor:
        """What slots are multiplied with after the cast: 1 / scale. It follows from the scale and takes no
        assignment."""
        inverse = torch.div(1.0, self.scale)
        return inverse.as_subclass(StateCopy)

    @property
    def amax_history(self) -> Tensor:
        """The recorded amaxes."""
        if self._layer is None:
            return self._history
        layer, length = self._layer, self.recipe.amax_history_len  # type: ignore[attr-defined]
        now = torch.cat((layer.fp8_amax, layer.recorded_gradient_amax()[None]))
        whole = torch.cat((now[None], layer.delayed_history(length - 1).flip(0)))
        outer = torch.cat((layer.fp8_outer_amax[None], layer.outer_history(length - 1).flip(0)))
        rest = outer[:, KINDS.index(self.mode)] if layer.outer_used else [0.0] * length
        rows = [_by_slot(row, self.mode, own) for row, own in zip(whole, rest, strict=True)]
        return torch.stack(rows).as_subclass(StateCopy)

    @amax_history.setter
    def amax_history(self, values: Tensor) -> None:
        if self._layer is None:
            self._history = values
            return
        layer = self._layer
        now = torch.cat((layer.fp8_amax, layer.recorded_gradient_amax()[None]))
        _into_roles(now, values[0], self.mode)
        layer.fp8_amax.copy_(now[:2])
        layer.fp8_grad_amax.copy_(now[2])
        history = layer.delayed_history(len(values) - 1).clone()
        for own, row in zip(history, values[1:].flip(0), strict=True):
            _into_roles(own, row, self.mode)
        layer.fp8_history = history

    def make_quantizers(self) -> list[Any]:
        if self._layer is not None:
            return te_quantizers(self._layer)["scaling_fwd" if self.mode == "forward" else "scaling_bwd"]
        assert self.dtype is not None, "delayed scaling is FP8"
        amaxes = self._history[0]
        return [Float8Quantizer(self._scale[i], amaxes[i : i + 1], self.dtype) for i in range(self.num_quantizers)]


def _by_slot(values: Tensor, mode: Mode, otherwise: float | Tensor) -> Tensor:
    """Return values [3, G] of the roles in the order of slots: [3 G] or [2 G]."""
    rest = torch.zeros_like(values[0]) + otherwise
    return torch.stack([rest if row is None else values[row] for row in _ROWS[mode]], 1).flatten().detach()


def _into_roles(values: Tensor, slots: Tensor, mode: Mode) -> None:
    """Write what is in the order of slots to values [3, G] of the roles."""
    by_gemm = slots.detach().reshape(values.shape[1], len(_ROWS[mode]))
    for place, row in enumerate(_ROWS[mode]):
        if row is not None:
            values[row].copy_(by_gemm[:, place])


def recipe_of(module: QuantizedModule) -> Recipe | None:
    """Return the recipe in force for a layer, or else the one that it last ran under, as far as that is known: a graph
    leaves a name behind, and for delayed scaling what its updates depend on."""
    if state().compute is not None:
        return module._chosen()[0]
    use = module.recipe_use
    if use.ran is None and use.asked != "delayed":
        return None
    if (use.ran or use.asked) == "delayed" and module.delayed_rule is not None:
        length, margin, algorithm, reduce_amax, hybrid = module.delayed_rule
        fp8_format = Format.HYBRID if hybrid else Format.E4M3
        return DelayedScaling(margin, fp8_format, length, algorithm, reduce_amax=reduce_amax)
    if use.last is not None and use.last.ran == use.ran:
        return use.last.recipe
    chosen = use.in_thread.now.chosen
    return None if chosen is None else chosen[0]


def fp8_meta(module: QuantizedModule) -> dict[str, Any]:
    """Return {"fp8_checkpoint": whether the layer ran under a recipe or was calibrated, "fp8_group": of the region},
    and once it was: "recipe", "num_gemms", "fp8_max_fwd" and "fp8_max_bwd" (of FP8), "scaling_fwd" and "scaling_bwd",
    see `RecipeState`."""
    meta: dict[str, Any] = {
        "fp8_checkpoint": module.recipe_use.asked not in (None, "none") or module.recipe_use.ran is not None,
        "fp8_group": state().amax_reduction_group,
    }
    recipe = recipe_of(module)
    if recipe is None:
        return meta
    gemms = module.fp8_scale.shape[1]
    meta |= {"recipe": recipe, "num_gemms": gemms}
    fp8_format = getattr(recipe, "fp8_format", None)
    if isinstance(fp8_format, Format):
        meta |= {"fp8_max_fwd": fp8_format.value.max_fwd, "fp8_max_bwd": fp8_format.value.max_bwd}
    for key, mode in KEYS.items():
        slots = gemms * len(SLOTS[mode])
        if isinstance(recipe, DelayedScaling):
            meta[key] = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=slots, layer=module)
        else:
            meta[key] = RecipeState(recipe, mode=mode, num_quantizers=slots)
    return meta


def te_quantizers(module: QuantizedModule) -> dict[str, list[Any]]:
    """Return the quantizers of a layer by slot; no slots before it ran under a recipe. Under delayed scaling they scale
    by the layer's tensors and record in them, until the next update makes new scales; others are copies of values."""
    recipe = recipe_of(module)
    found: dict[str, list[Any]] = {key: [] for key in KEYS}
    if recipe is None:
        return found
    chosen: GemmQuantizers = recipe.quantizers(module.kind, module.name)
    for key, mode in KEYS.items():
        for gemm in range(module.fp8_scale.shape[1]):
            found[key] += [None if role is None else _live(module, chosen, role, gemm) for role in SLOTS[mode]]
    return found


def _live(module: QuantizedModule, chosen: GemmQuantizers, role: str, gemm: int) -> Any:
    quantizer: Any = getattr(chosen, role)
    if not quantizer.NEEDS_STATE:
        return quantizer.copy()
    if role == "grad_output":
        state = QuantizerState(gradient=module.fp8_gradient)
        return with_gradient_state(quantizer, state, module.recorded_gradient_amax, gemm)
    return with_state(quantizer, module.fp8_scale, module.fp8_amax, role, gemm)


class TEState:
    """Mixin of layers: what programs of Transformer Engine read of them."""

    recipe_use: RecipeUse

    @property
    def fp8(self) -> bool:
        """Whether the last forward pass ran under a recipe."""
        return self.recipe_use.ran is not None

    @property
    def fp8_calibration(self) -> bool:
        """Whether the last forward pass was one of a calibration."""
        return self.recipe_use.ran is None and self.recipe_use.asked not in (None, "none")

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weights are stored quantized."""
        module = cast("QuantizedModule", self)
        return any(isinstance(getattr(module, name), QuantizedTensor) for name in module.weight_names())

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The recipe and its state: see the function `fp8_meta`."""
        return fp8_meta(cast("QuantizedModule", self))

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """{"scaling_fwd": quantizers of input, weight and output of each GEMM, "scaling_bwd": of grad_output and
        grad_input}, None where nothing is quantized: see `te_quantizers`."""
        return te_quantizers(cast("QuantizedModule", self))
