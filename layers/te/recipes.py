"""What programs of Transformer Engine say to recipes and ask of them, beyond what a recipe is here.

MXFP8BlockScaling(0, Format.E4M3)        arguments in its order, those that mean nothing here at their defaults
recipe.mxfp8()                           which recipe it is, asked of a value or of a class
recipe.fp4_quant_fwd_inp = QParams()     how an operand is quantized, in its words, read and assigned (`assignment`)
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from te_models.suggestions import shown

from ..recipe.base import Format, Recipe
from ..recipe.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .arguments import add_members, takes_in_order
from .assignment import assign


@dataclass(frozen=True)
class MMParams:
    """Options of a GEMM; recipes take them at their defaults. use_split_accumulator: sum FP8 products in float32 and
    not in the shorter accumulator of some accelerators."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a recipe quantizes one operand: `recipe.fp8_quant_fwd_inp` and its like return one, and take one that is
    assigned. The recipe's own arguments say the same."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _refuse_others(name: str, params: QParams, *allowed: str) -> None:
    """Raise ValueError where `params`, called `name`, ask for more than these options."""
    for option in (field.name for field in dataclasses.fields(QParams)):
        if option not in allowed and getattr(params, option):
            raise ValueError(
                f"{name} has {option}={shown(getattr(params, option))}; allowed: {getattr(QParams, option)}, or a "
                "CustomRecipe, whose quantizers are your own"
            )


# --- arguments -------------------------------------------------------------------------------------------------------

_ATTENTION: dict[str, Any] = {"fp8_dpa": False, "fp8_mha": False}
_GEMMS = "fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha"
_ARGUMENTS: dict[type[Recipe], tuple[str, dict[str, Any]]] = {
    DelayedScaling: (
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha",
        {
            "scaling_factor_compute_algo": None,
            **_ATTENTION,
            "override_linear_precision": (False, False, False),
            "interval": 1,
        },
    ),
    Float8CurrentScaling: (
        f"use_power_2_scales fp8_format {_GEMMS}",
        {f"fp8_gemm_{gemm}": MMParams(gemm != "fprop") for gemm in ("fprop", "dgrad", "wgrad")} | _ATTENTION,
    ),
    Float8BlockScaling: (
        f"use_f32_scales fp8_format x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim {_GEMMS}",
        {f"fp8_gemm_{gemm}": MMParams() for gemm in ("fprop", "dgrad", "wgrad")} | _ATTENTION,
    ),
    MXFP8BlockScaling: ("margin fp8_format fp8_dpa fp8_mha", {"margin": 0, **_ATTENTION}),
    NVFP4BlockScaling: (
        "disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation nvfp4_4over6 "
        "nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format fp8_format fp8_dpa fp8_mha",
        {"fp4_format": Format.E2M1, "fp8_format": Format.E4M3, **_ATTENTION},
    ),
    CustomRecipe: ("qfactory fp8_format fp8_dpa fp8_mha", _ATTENTION),
}
"""Recipe -> its arguments by position, and at which values those are taken that mean nothing here."""

_THE_SAME = dict.fromkeys(_GEMMS.split()[:3]) | {"interval": -1}
"""Other values that say the same."""

for _cls, (_order, _defaults) in _ARGUMENTS.items():
    _free = {"fp8_format": Format.HYBRID} if _cls is CustomRecipe else {}
    _cls.__init__ = takes_in_order(_order, _THE_SAME, _free, **_defaults)(_cls.__init__)  # type: ignore[method-assign]
    _cls.__setattr__ = assign  # type: ignore[assignment, method-assign]
    for _name, _default in {**_defaults, **_free}.items():
        setattr(_cls, _name, _default)


# --- which recipe it is ----------------------------------------------------------------------------------------------


class _OfEveryRecipe:
    NAME: ClassVar[str]
    QPARAMS: ClassVar[tuple[str, ...]] = ()
    """The names under which it has and takes QParams, of x, w and dy."""

    @classmethod
    def delayed(cls) -> bool:
        """Whether it is DelayedScaling."""
        return _is_named(cls, "delayed")

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether it is Float8CurrentScaling."""
        return _is_named(cls, "current")

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether it is DelayedScaling or Float8CurrentScaling."""
        return _is_named(cls, "delayed", "current")

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether it is Float8BlockScaling."""
        return _is_named(cls, "block")

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether it is MXFP8BlockScaling."""
        return _is_named(cls, "mxfp8")

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether it is NVFP4BlockScaling."""
        return _is_named(cls, "nvfp4")

    @classmethod
    def custom(cls) -> bool:
        """Whether it is a CustomRecipe."""
        return _is_named(cls, "custom")


def _is_named(recipe: type, *names: str) -> bool:
    return getattr(recipe, "NAME", None) in names


# --- how it quantizes each operand -----------------------------------------------------------------------------------


class _AllAlike:
    """Of recipes that quantize x, w and dy by the same options."""

    QPARAMS: ClassVar[tuple[str, ...]] = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    POWER_2: ClassVar[tuple[str, bool]]
    """The field that says whether scales are powers of two, and its value where they are."""

    @property
    def fp8_quant_fwd_inp(self: Any) -> QParams:
        """How inputs are quantized."""
        name, yes = self.POWER_2
        return QParams(power_2_scale=getattr(self, name) == yes, amax_epsilon=self.amax_epsilon)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def fields_of(self, asked: dict[str, QParams]) -> tuple[dict[str, Any], str]:
        """Return (the fields of a recipe that quantizes as `asked`, by the names in QPARAMS, ""), or ({}, a sentence)
        where these contradict each other. ValueError for what this kind of recipe never does."""
        for name, params in asked.items():
            _refuse_others(name, params, "power_2_scale", "amax_epsilon")
        if len(set(asked.values())) > 1:
            return (
                {},
                f"{', '.join(asked)} differ from each other; allowed: the same QParams for all, or a CustomRecipe",
            )
        params, (name, yes) = asked[self.QPARAMS[0]], self.POWER_2
        return {name: params.power_2_scale is yes, "amax_epsilon": params.amax_epsilon}, ""


class _OfNVFP4:
    QPARAMS: ClassVar[tuple[str, ...]] = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")

    @property
    def fp4_quant_fwd_inp(self: Any) -> QParams:
        """How inputs are quantized."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self: Any) -> QParams:
        """How weights are quantized."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self: Any) -> QParams:
        """How gradients are quantized."""
        stochastic = not self.disable_stochastic_rounding
        return QParams(random_hadamard_transform=not self.disable_rht, stochastic_rounding=stochastic)

    def fields_of(self, asked: dict[str, QParams]) -> tuple[dict[str, Any], str]:
        """As of recipes that quantize all operands alike."""
        x, w, dy = [asked[name] for name in self.QPARAMS]
        _refuse_others("fp4_quant_fwd_inp", x, "random_hadamard_transform")
        _refuse_others("fp4_quant_fwd_weight", w, "fp4_2d_quantization")
        _refuse_others("fp4_quant_bwd_grad", dy, "random_hadamard_transform", "stochastic_rounding")
        if x.random_hadamard_transform != dy.random_hadamard_transform:
            return {}, (
                f"fp4_quant_fwd_inp has random_hadamard_transform={x.random_hadamard_transform} and fp4_quant_bwd_grad "
                f"{dy.random_hadamard_transform}, but in wgrad the transform cancels only against itself; allowed: "
                "alike for the two"
            )
        return {
            "disable_rht": not x.random_hadamard_transform,
            "disable_stochastic_rounding": not dy.stochastic_rounding,
            "disable_2d_quantization": not w.fp4_2d_quantization,
        }, ""


add_members(Recipe, _OfEveryRecipe)
_POWERS_2 = {Float8CurrentScaling: ("use_power_2_scales", True), Float8BlockScaling: ("use_f32_scales", False)}
for _cls, _power_2 in _POWERS_2.items():
    add_members(_cls, _AllAlike)
    _cls.POWER_2 = _power_2  # type: ignore[attr-defined]
add_members(NVFP4BlockScaling, _OfNVFP4)
