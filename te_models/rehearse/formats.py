"""The formats that a rehearsal compares, each with the keys of [precision] that ask for it and its relative cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from te_models.layers import Recipe

from ..config import ConfigError
from ..suggestions import did_you_mean
from ..training.config import PrecisionConfig
from ..training.precision import build_recipe

HIGH = "bf16"
"""The format of a layer without a recipe."""
COSTS = {HIGH: 1.0, "fp8": 0.5, "fp4": 0.25}
"""Time of a GEMM by the width of its operands, bf16 = 1: the ratio of dense peaks of tensor cores that have all three
(2.25, 4.5 and 9 PFLOP/s of an NVIDIA B200's data sheet). What quantizing itself takes is left out."""


@dataclass(frozen=True)
class RehearsedFormat:
    """A recipe with its options, under the name that rehearsals give it. width: a key of COSTS."""

    name: str
    recipe: str
    options: tuple[str, ...] = ()
    width: str = "fp8"

    @property
    def cost(self) -> float:
        """The relative time of a GEMM."""
        return COSTS[self.width]

    def precision(self, base: PrecisionConfig) -> PrecisionConfig:
        """Return the [precision] table that has every layer in this format, with the dtypes of `base`."""
        return plain(base).replace(recipe=self.recipe, recipe_options=self.options)

    def value(self) -> Recipe:
        """Return the recipe."""
        found = build_recipe(self.precision(PrecisionConfig()), 1)
        assert found is not None, "a format has a recipe"
        return found


def _nvfp4(name: str, *options: str) -> RehearsedFormat:
    return RehearsedFormat(name, "nvfp4", options, "fp4")


FORMATS = {
    found.name: found
    for found in (
        *(RehearsedFormat(name, name) for name in ("delayed", "current", "block", "mxfp8")),
        _nvfp4("nvfp4"),
        RehearsedFormat("mxfp8-2d", "mxfp8", ("enable_2d_quantization=true",)),
        _nvfp4("nvfp4-no-rht", "disable_rht=true"),
        _nvfp4("nvfp4-nearest", "disable_stochastic_rounding=true"),
        _nvfp4("nvfp4-1d", "disable_2d_quantization=true"),
        _nvfp4("nvfp4-4over6", "nvfp4_4over6=weights"),
        _nvfp4("nvfp4-rows", "row_scaled_activation=true"),
    )
}
"""Name -> format: the five recipes at their defaults, then their options. A CustomRecipe is a program's own."""
USUAL = ("delayed", "current", "block", "mxfp8", "nvfp4")
"""The formats whose effect on the loss is measured where none are named."""


def formats_of(names: Sequence[str]) -> list[RehearsedFormat]:
    """Return formats by name. ConfigError for an unknown name, and for none."""
    for name in names:
        if name not in FORMATS:
            raise ConfigError(
                f"the format {name!r} is unknown; allowed: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}"
            )
    if not names:
        raise ConfigError(f"no format is named; allowed: {', '.join(FORMATS)}")
    return [FORMATS[name] for name in dict.fromkeys(names)]


def plain(base: PrecisionConfig) -> PrecisionConfig:
    """Return `base` without a recipe: its dtypes alone."""
    return PrecisionConfig(dtype=base.dtype, cpu_gemm=base.cpu_gemm)
