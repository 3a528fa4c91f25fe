"""The recipes. What each computes is defined by the kernels' references; here is only which quantizer serves which
operand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from te_models.suggestions import check_choice, shown

from ..quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from ..quantizer.delayed import DelayedScalingQuantizer
from .base import Format, GemmQuantizers, QuantizerRole, Recipe, Role

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]
DelayedRule = tuple[int, int, AmaxAlgorithm, bool, bool]


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor scales from the amaxes of earlier steps: `scale = fp8_max * 2^-margin / amax`. HYBRID by default.

    amax_history_len: how many steps are remembered. amax_compute_algo: "max" over them, "most_recent", or a function
    of the history [length, ...], newest first, that returns amaxes [...]. reduce_amax: take the maximum over the ranks
    of the amax reduction group that `autocast` is given. Weights that `quantized_model_init` stores are scaled by their
    own amax whenever they are requantized, so a stored weight is never clipped by an old scale. Raises ValueError for
    an option that is not allowed, and TypeError in `to_dict` if amax_compute_algo is a function.
    """

    NAME: ClassVar[str] = "delayed"
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {shown(self.amax_history_len)}; allowed: a positive integer")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo is {shown(self.amax_compute_algo)}; allowed: 'max', 'most_recent', or a function"
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


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the amax of this very tensor. HYBRID by default.

    use_power_2_scales rounds scales down to powers of two; amax_epsilon is a floor for amax.
    """

    NAME: ClassVar[str] = "current"
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    amax_epsilon: float = field(default=0.0, kw_only=True)

    def _quantizer(self, role: Role) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            fp8_dtype=self.fp8_format.dtype(role),
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=self.amax_epsilon,
        )


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's scheme: 1x128 blocks for x and dy, 128x128 for w, E4M3 throughout, power-of-two scales.

    use_f32_scales: keep float32 scales. *_block_scaling_dim: 1 or 2. Raises ValueError for another
    value, and where a GEMM would multiply two operands with 128x128 blocks.
    """

    NAME: ClassVar[str] = "block"
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    amax_epsilon: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        dims = {n: getattr(self, f"{n}_block_scaling_dim") for n in ("x", "w", "grad")}
        for name, dim in dims.items():
            check_choice(f"{name}_block_scaling_dim", dim, (1, 2))
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


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """OCP microscaling: 1x32 blocks with a power-of-two scale byte. E4M3 throughout.

    enable_2d_quantization uses 32x32 blocks for weights, whose transpose then has the same numbers.
    """

    NAME: ClassVar[str] = "mxfp8"
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = field(default=False, kw_only=True)

    def _quantizer(self, role: Role) -> Quantizer:
        two_dimensional = self.enable_2d_quantization and role == "weight"
        return MXFP8Quantizer(fp8_dtype=self.fp8_format.dtype(role), two_dimensional=two_dimensional)


Scope = Literal["none", "weights", "activations", "all"]


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Four-bit E2M1 with an E4M3 scale per 16 values and a float32 one per tensor (arXiv 2509.25149).

    Weights use 16x16 blocks; the columnwise copies of x and dy get a random Hadamard transform that cancels in wgrad;
    dy is rounded stochastically. Each of the three can be switched off.

    row_scaled_activation: x has a float32 scale per row in fprop. nvfp4_4over6: quantize "weights", "activations" (x)
    or "all" with two candidates per block, see `NVFP4Quantizer`; x only with disable_rht. nvfp4_4over6_e4m3_use_256:
    which of these have 256 as the largest block scale, and not 448. nvfp4_4over6_err_mode: "MAE" or "MSE". Raises
    ValueError for other values.
    """

    NAME: ClassVar[str] = "nvfp4"
    LATER_FIELDS: ClassVar[tuple[str, ...]] = (
        "row_scaled_activation",
        "nvfp4_4over6",
        "nvfp4_4over6_e4m3_use_256",
        "nvfp4_4over6_err_mode",
    )
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: Scope = "none"
    nvfp4_4over6_e4m3_use_256: Scope = "all"
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"

    def __post_init__(self) -> None:
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if getattr(self, name) not in get_args(Scope):
                allowed = ", ".join(map(repr, get_args(Scope)))
                raise ValueError(f"{name} is {shown(getattr(self, name))}; allowed: {allowed}")
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError(
                f"nvfp4_4over6 is {shown(self.nvfp4_4over6)}; allowed with disable_rht=False: 'none', 'weights'"
            )
        super().__post_init__()

    def _four_over_six(self, scope: Scope) -> dict[str, Any]:
        """Return the options of quantizers of the tensors "weights" or "activations"."""
        if self.nvfp4_4over6 not in (scope, "all"):
            return {}
        e4m3_max = 256 if self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else 448
        return {
            "nvfp4_use_4over6": True,
            "nvfp4_e4m3_max": e4m3_max,
            "nvfp4_4over6_err_mode": self.nvfp4_4over6_err_mode,
        }

    def _quantizer(self, role: Role) -> Quantizer:
        rht = not self.disable_rht
        if role == "weight":
            two_dimensional = not self.disable_2d_quantization
            return NVFP4Quantizer(with_2d_quantization=two_dimensional, **self._four_over_six("weights"))
        if role == "grad_output":
            return NVFP4Quantizer(with_rht=rht, stochastic_rounding=not self.disable_stochastic_rounding)
        candidates = self._four_over_six("activations")
        if not self.row_scaled_activation:
            return NVFP4Quantizer(with_rht=rht, **candidates)
        rows = NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True, **candidates)
        if self.backward_override is not None:
            return rows
        of_wgrad = NVFP4Quantizer(rowwise=False, with_rht=rht, **candidates)
        return HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=of_wgrad)


@dataclass(frozen=True, eq=False)
class CustomRecipe(Recipe):
    """Quantizers from a function of the role: `qfactory(QuantizerRole) -> Quantizer`.

    Two custom recipes are equal only if they are the same object: a function has no value to compare. It is called for
    the three tensors of a layer when that layer first runs in the region, once; in a program with compiled layers when
    a region is entered, for all layers that exist then, because a graph cannot call it. It may be called again, so it
    must return equal quantizers for equal roles. An error of the function for a layer is raised when that layer runs.
    Raises TypeError when a layer runs for which qfactory returned no Quantizer, or a quantizer of delayed scaling, and
    in `to_dict`: a function has no JSON form.

    Example:
        def mixed(role):
            if role.tensor_type == "grad_output":
                return Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
            return IdentityQuantizer() if role.name.endswith("linear_proj") else MXFP8Quantizer()

        with autocast(recipe=CustomRecipe(qfactory=mixed)): ...
    """

    NAME: ClassVar[str] = "custom"
    by_name: ClassVar[bool] = True
    qfactory: Callable[[QuantizerRole], Quantizer]

    def quantizers(self, module: str, name: str) -> GemmQuantizers:
        kind = "grouped_linear" if module == "GroupedLinear" else "linear"
        return GemmQuantizers(
            self.quantizer_for(QuantizerRole(kind, "input", name, module)),
            self.quantizer_for(QuantizerRole(kind, "weight", name, module)),
            self.quantizer_for(QuantizerRole(kind, "grad_output", name, module)),
            self.backward_override,
        )

    def quantizer_for(self, role: QuantizerRole) -> Quantizer:
        """Return what qfactory returns for a role. TypeError for anything but a quantizer without state."""
        quantizer = self.qfactory(role)
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"qfactory returned {shown(quantizer)} for {role}; allowed: a Quantizer")
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
