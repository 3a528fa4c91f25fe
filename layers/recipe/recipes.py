"""The recipes. What each computes is defined by the kernels' references; here is only which quantizer serves which
operand, and the options under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from ..quantizer.delayed import DelayedScalingQuantizer
from ..te_arguments import require_default
from .base import RECIPES, Format, GemmQuantizers, QuantizerRole, Recipe, Role, recipe

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]
DelayedRule = tuple[int, int, AmaxAlgorithm, bool, bool]


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Per-tensor scales from the amaxes of earlier steps: `scale = fp8_max * 2^-margin / amax`. HYBRID by default.

    amax_history_len: how many steps are remembered. amax_compute_algo: "max" over them, "most_recent", or a function
    of the history [length, ...], newest first, that returns amaxes [...]. reduce_amax: take the maximum over the ranks
    of the amax reduction group that `autocast` is given. Weights that `quantized_model_init` stores are scaled by their
    own amax whenever they are requantized, so a stored weight is never clipped by an old scale. fp8_dpa, fp8_mha,
    scaling_factor_compute_algo, override_linear_precision: Transformer Engine's, at their defaults. Raises ValueError
    for an option that is not allowed, and TypeError in `to_dict` if amax_compute_algo is a function.
    """

    NAME: ClassVar[str] = "delayed"
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False
    scaling_factor_compute_algo: InitVar[None] = None
    override_linear_precision: InitVar[tuple[bool, bool, bool]] = (False, False, False)

    def __post_init__(
        self, fp8_dpa: bool, fp8_mha: bool, scaling_factor_compute_algo: None, override_linear_precision: Any
    ) -> None:
        require_default("fp8_dpa", fp8_dpa, False)
        require_default("fp8_mha", fp8_mha, False)
        require_default("scaling_factor_compute_algo", scaling_factor_compute_algo, None)
        require_default("override_linear_precision", tuple(override_linear_precision), (False, False, False))
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len!r}; allowed: a positive integer")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo is {self.amax_compute_algo!r}; allowed: 'max', 'most_recent', or a function"
            )
        super().__post_init__()

    def _quantizer(self, role: Role) -> Quantizer:
        return DelayedScalingQuantizer(fp8_dtype=self.fp8_format.dtype(role))

    def rule(self) -> DelayedRule:
        """Return what updates depend on: (history length, margin, algorithm, reduce_amax, whether HYBRID). A tuple and
        not this value, because a module that runs in a compiled region keeps it there."""
        hybrid = self.fp8_format is Format.HYBRID
        return (self.amax_history_len, self.margin, self.amax_compute_algo, self.reduce_amax, hybrid)

    def to_dict(self) -> dict[str, Any]:
        if callable(self.amax_compute_algo):
            raise TypeError("a DelayedScaling recipe whose amax_compute_algo is a function has no JSON form")
        return super().to_dict()


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the amax of this very tensor. HYBRID by default.

    use_power_2_scales rounds scales down to powers of two; amax_epsilon is a floor for amax.
    """

    NAME: ClassVar[str] = "current"
    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def _quantizer(self, role: Role) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            fp8_dtype=self.fp8_format.dtype(role),
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=self.amax_epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's scheme: 1x128 blocks for x and dy, 128x128 for w, E4M3 throughout, power-of-two scales.

    use_f32_scales: keep float32 scales. *_block_scaling_dim: 1 or 2. Raises ValueError for another value, and where a
    GEMM would multiply two operands with 128x128 blocks.
    """

    NAME: ClassVar[str] = "block"
    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        dims = {n: getattr(self, f"{n}_block_scaling_dim") for n in ("x", "w", "grad")}
        for name, dim in dims.items():
            if dim not in (1, 2):
                raise ValueError(f"{name}_block_scaling_dim is {dim!r}; allowed: 1, 2")
        for a, b in (("x", "w"), ("grad", "w"), ("grad", "x")):
            if dims[a] == dims[b] == 2:
                raise ValueError(f"{a}_block_scaling_dim and {b}_block_scaling_dim are both 2; allowed: one of the two")
        super().__post_init__()

    def _quantizer(self, role: Role) -> Quantizer:
        dims = {"input": self.x_block_scaling_dim, "weight": self.w_block_scaling_dim}
        return Float8BlockQuantizer(
            fp8_dtype=self.fp8_format.dtype(role),
            block_scaling_dim=dims.get(role, self.grad_block_scaling_dim),
            force_pow_2_scales=not self.use_f32_scales,
            amax_epsilon=self.amax_epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """OCP microscaling: 1x32 blocks with a power-of-two scale byte. E4M3 throughout.

    enable_2d_quantization uses 32x32 blocks for weights, whose transpose then has the same numbers.
    """

    NAME: ClassVar[str] = "mxfp8"
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def _quantizer(self, role: Role) -> Quantizer:
        two_dimensional = self.enable_2d_quantization and role == "weight"
        return MXFP8Quantizer(fp8_dtype=self.fp8_format.dtype(role), two_dimensional=two_dimensional)


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """Four-bit E2M1 with an E4M3 scale per 16 values and a float32 one per tensor (arXiv 2509.25149).

    Weights use 16x16 blocks; the columnwise copies of x and dy get a random Hadamard transform, which cancels in wgrad;
    dy is rounded stochastically. Each of the three can be switched off.
    """

    NAME: ClassVar[str] = "nvfp4"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def _quantizer(self, role: Role) -> Quantizer:
        if role == "weight":
            return NVFP4Quantizer(with_2d_quantization=not self.disable_2d_quantization)
        stochastic = role == "grad_output" and not self.disable_stochastic_rounding
        return NVFP4Quantizer(with_rht=not self.disable_rht, stochastic_rounding=stochastic)


@dataclass(frozen=True, kw_only=True, eq=False)
class CustomRecipe(Recipe):
    """Quantizers from a function of the role: `qfactory(QuantizerRole) -> Quantizer`.

    Two custom recipes are equal only if they are the same object: a function has no value to compare. It is called
    when a region is entered, for the layers that exist then, and may be called again whenever a layer runs, so it must
    return equal quantizers for equal roles. An error of the function for a layer is raised when that layer runs.

    Raises TypeError when a layer runs for which qfactory returned no Quantizer, or a quantizer of delayed scaling, and
    in `to_dict`: a function has no JSON form.

    Example:
        def mixed(role):
            if role.tensor == "grad_output":
                return Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
            return IdentityQuantizer() if role.name.endswith("linear_proj") else MXFP8Quantizer()

        with autocast(recipe=CustomRecipe(qfactory=mixed)): ...
    """

    NAME: ClassVar[str] = "custom"
    by_name: ClassVar[bool] = True
    qfactory: Callable[[QuantizerRole], Quantizer]

    def quantizers(self, module: str, name: str) -> GemmQuantizers:
        return GemmQuantizers(
            self._made(QuantizerRole(module, "input", name)),
            self._made(QuantizerRole(module, "weight", name)),
            self._made(QuantizerRole(module, "grad_output", name)),
            self.backward_override,
        )

    def _made(self, role: QuantizerRole) -> Quantizer:
        quantizer = self.qfactory(role)
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"qfactory returned {quantizer!r} for {role}; allowed: a Quantizer")
        for used in (quantizer.member("rowwise"), quantizer.member("columnwise")):
            if used.NEEDS_STATE:
                raise TypeError(
                    f"qfactory returned a DelayedScalingQuantizer for {role}, whose scales are a module's state that "
                    "only the recipe DelayedScaling keeps; allowed: a quantizer of another class, for example "
                    "Float8CurrentScalingQuantizer"
                )
        return quantizer

    def to_dict(self) -> dict[str, Any]:
        raise TypeError("a CustomRecipe has no JSON form: its qfactory is a function")


# a script that imports Transformer Engine's module `recipe` writes `recipe.DelayedScaling`; here it finds the function
for _class in (Format, *RECIPES.values()):
    setattr(recipe, _class.__name__, _class)
