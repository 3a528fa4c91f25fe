"""Recipes: frozen values that say which format each operand of fprop, dgrad and wgrad gets.

Nothing else decides numerics.

Names and defaults follow Transformer Engine's `common.recipe`. Not a recipe's business: where scales live, which
kernel runs, when weights are cached.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from .quantizer import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer


class Format(enum.Enum):
    """FP8 formats: E4M3 everywhere, or HYBRID: E4M3 in the forward pass, E5M2 for gradients."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"

    @property
    def forward_dtype(self) -> torch.dtype:
        """The dtype of inputs and weights."""
        return torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        """The dtype of output gradients."""
        return torch.float8_e5m2 if self is Format.HYBRID else torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes: value equality, hash, JSON round trip. A subclass names a quantizer for each operand."""

    NAME: ClassVar[str]

    def input_quantizer(self) -> Quantizer:
        """Return the quantizer of layer inputs x: [rows, in]."""
        raise NotImplementedError

    def weight_quantizer(self) -> Quantizer:
        """Return the quantizer of weights w: [out, in]."""
        raise NotImplementedError

    def grad_output_quantizer(self) -> Quantizer:
        """Return the quantizer of output gradients dy: [rows, out]."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return {"recipe": name, field: plain JSON value}."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"recipe": self.NAME} | {k: v.value if isinstance(v, enum.Enum) else v for k, v in values.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Recipe:
        """Rebuild from `to_dict`; an unknown recipe or field raises ValueError by name."""
        values = dict(values)
        cls = _named(values.pop("recipe", None))
        hints = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in hints:
                raise ValueError(f"{cls.__name__} has no field {name!r}; its fields are: {', '.join(sorted(hints))}")
        if "fp8_format" in values:
            values["fp8_format"] = Format(values["fp8_format"])
        return cls(**values)

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Rebuild from `to_json`."""
        return cls.from_dict(json.loads(text))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the named fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the amax of this very tensor. HYBRID by default.

    use_power_2_scales rounds scales down to powers of two; amax_epsilon is a floor for amax.
    """

    NAME: ClassVar[str] = "current"
    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def _quantizer(self, dtype: torch.dtype) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            fp8_dtype=dtype, force_pow_2_scales=self.use_power_2_scales, amax_epsilon=self.amax_epsilon
        )

    def input_quantizer(self) -> Quantizer:
        return self._quantizer(self.fp8_format.forward_dtype)

    def weight_quantizer(self) -> Quantizer:
        return self._quantizer(self.fp8_format.forward_dtype)

    def grad_output_quantizer(self) -> Quantizer:
        return self._quantizer(self.fp8_format.backward_dtype)


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's scheme: 1x128 blocks for x and dy, 128x128 for w, E4M3 throughout, power-of-two scales.

    use_f32_scales keeps float32 scales. *_block_scaling_dim: 1 or 2; a product of two 2-D operands is refused.
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

    def _quantizer(self, dtype: torch.dtype, dim: int) -> Quantizer:
        return Float8BlockQuantizer(
            fp8_dtype=dtype,
            block_scaling_dim=dim,
            force_pow_2_scales=not self.use_f32_scales,
            amax_epsilon=self.amax_epsilon,
        )

    def input_quantizer(self) -> Quantizer:
        return self._quantizer(self.fp8_format.forward_dtype, self.x_block_scaling_dim)

    def weight_quantizer(self) -> Quantizer:
        return self._quantizer(self.fp8_format.forward_dtype, self.w_block_scaling_dim)

    def grad_output_quantizer(self) -> Quantizer:
        return self._quantizer(self.fp8_format.backward_dtype, self.grad_block_scaling_dim)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """OCP microscaling: 1x32 blocks with a power-of-two scale byte. E4M3 throughout.

    enable_2d_quantization uses 32x32 blocks for weights, whose transpose then has the same numbers.
    """

    NAME: ClassVar[str] = "mxfp8"
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def input_quantizer(self) -> Quantizer:
        return MXFP8Quantizer(fp8_dtype=self.fp8_format.forward_dtype)

    def weight_quantizer(self) -> Quantizer:
        return MXFP8Quantizer(fp8_dtype=self.fp8_format.forward_dtype, two_dimensional=self.enable_2d_quantization)

    def grad_output_quantizer(self) -> Quantizer:
        return MXFP8Quantizer(fp8_dtype=self.fp8_format.backward_dtype)


RECIPES: dict[str, type[Recipe]] = {r.NAME: r for r in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)}


def _named(name: object) -> type[Recipe]:
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; allowed: {', '.join(map(repr, RECIPES))}")
    return RECIPES[name]  # type: ignore[index]


def recipe(name: str, **fields: Any) -> Recipe:
    """Return a recipe by its short name: "current", "block" or "mxfp8"; fields as for its class."""
    return _named(name)(**fields)
