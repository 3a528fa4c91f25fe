"""The table [precision]: number formats and recipes.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ConfigPart):
    """Number formats and the recipe of the linear layers.

    In the patterns of `overrides`, * is anything, ? one character, [02] one of those.
    """

    dtype: Literal["fp32", "bf16", "bf16-mixed"] = "bf16"
    """Number format: of parameters and compute, or float32 parameters with bf16 compute (bf16-mixed)."""
    recipe: Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"] = "none"
    """Recipe of the linear layers."""
    recipe_options: tuple[str, ...] = ()
    """Fields of the recipe, as "name=value" with a JSON value ("amax_history_len=16")."""
    overrides: tuple[str, ...] = ()
    """Recipes of layers by name, as "pattern=recipe" or "pattern=bf16" with a glob; the first match wins."""
    first_layers_bf16: int = 0
    """Layers at the beginning that stay in high precision."""
    last_layers_bf16: int = 0
    """Layers at the end that stay in high precision."""
    quantized_weights: bool = False
    """Whether the weights are stored quantized as well."""
    cache_weights: bool = False
    """Whether each weight is quantized once for a step, and not in every micro-batch."""
    cpu_gemm: Literal["auto", "bf16", "float32"] = "auto"
    """Dtype in which a CPU multiplies 16-bit matrices: the faster one of the first rank's machine (auto), which a run
    keeps when it continues, or this one."""

    def _validate(self) -> None:
        if self.recipe == "none":
            for name in ("recipe_options", "overrides", "first_layers_bf16", "last_layers_bf16"):
                value = getattr(self, name)
                check(not value, f"precision.{name}", value, "empty without a recipe")
            for name in ("quantized_weights", "cache_weights"):
                check(not getattr(self, name), f"precision.{name}", True, "false without a recipe")
        for name in ("first_layers_bf16", "last_layers_bf16"):
            check(getattr(self, name) >= 0, f"precision.{name}", getattr(self, name), "zero or a positive integer")
        for name in ("recipe_options", "overrides"):
            for text in getattr(self, name):
                check(
                    "=" in text,
                    f"precision.{name}",
                    text,
                    "name=value" if name == "recipe_options" else "pattern=recipe",
                )
