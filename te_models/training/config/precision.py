"""The table [precision]: number formats and recipes.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check

RecipeName = Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"]


_BOTH = ("current", "block", "mxfp8", "nvfp4")
"""The formats of `qat` that are recipes, too."""


@dataclass(frozen=True, kw_only=True)
class RecipeKeys(ConfigPart):
    """The recipe of the linear layers, of a run or of one part of it.

    In the patterns of `overrides`, * is anything, ? one character, [02] one of those.
    """

    recipe: RecipeName = "none"
    """Recipe of the linear layers."""
    recipe_options: tuple[str, ...] = ()
    """Fields of the recipe, as "name=value" with a JSON value ("amax_history_len=16")."""
    overrides: tuple[str, ...] = ()
    """Recipes of layers by name, as "pattern=recipe" or "pattern=bf16" with a glob; the first match wins."""
    first_layers_bf16: int = 0
    """Layers at the beginning that stay in high precision."""
    last_layers_bf16: int = 0
    """Layers at the end that stay in high precision."""

    def _check_recipe(self, where: str) -> None:
        """Raise ConfigError, naming the keys of table `where`, unless they describe one recipe."""
        if self.recipe == "none":
            for name in ("recipe_options", "overrides", "first_layers_bf16", "last_layers_bf16"):
                value = getattr(self, name)
                check(not value, f"{where}.{name}", value, "empty without a recipe")
        for name in ("first_layers_bf16", "last_layers_bf16"):
            check(getattr(self, name) >= 0, f"{where}.{name}", getattr(self, name), "zero or a positive integer")
        for name in ("recipe_options", "overrides"):
            for text in getattr(self, name):
                allowed = "name=value" if name == "recipe_options" else "pattern=recipe"
                check("=" in text, f"{where}.{name}", text, allowed)


@dataclass(frozen=True, kw_only=True)
class RecipePhase(RecipeKeys):
    """Another recipe from a step on, until the next of these tables: it says all of it, and inherits no key."""

    from_step: int | None = None
    """First step under this recipe; steps are counted from 1."""
    from_share: float | None = None
    """The same as a share of `steps`: 0.9 leaves the last tenth to this recipe."""
    passes: Literal["both", "forward"] = "both"
    """Passes under this recipe: with forward, the gradients are computed as in the phase before."""

    def _validate(self) -> None:
        where, share = "precision.schedule", self.from_share
        self._check_recipe(where)
        both = (self.from_step is None) == (share is None)
        check(not both, f"{where}.from_step", self.from_step, "a step, or from_share in its place, one of the two")
        check(share is None or 0 < share < 1, f"{where}.from_share", share, "a number above 0 and below 1")
        check(self.from_step is None or self.from_step > 1, f"{where}.from_step", self.from_step, "an integer above 1")
        check(
            self.passes == "both" or self.recipe != "delayed",
            f"{where}.recipe",
            self.recipe,
            "a recipe without a history of its own with passes = 'forward'",
        )

    def begin(self, steps: int) -> int:
        """Return how many steps of a run of `steps` come before this phase."""
        return self.from_step - 1 if self.from_step is not None else round((self.from_share or 0.0) * steps)

    def in_words(self) -> str:
        """Return the recipe as the metrics name it."""
        return self.recipe if self.passes == "both" else f"{self.recipe} (forward)"


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(RecipeKeys):
    """Number formats and the recipe of the linear layers.

    In the patterns of `overrides`, * is anything, ? one character, [02] one of those.
    """

    dtype: Literal["fp32", "bf16", "bf16-mixed"] = "bf16"
    """Number format: of parameters and compute, or float32 parameters with bf16 compute (bf16-mixed)."""
    schedule: tuple[RecipePhase, ...] = ()
    """Other recipes later in the run, a table for each, in the order in which they begin."""
    qat: Literal["none", "current", "block", "mxfp8", "nvfp4", "mxfp4", "int4", "int8"] = "none"
    """Format that passes see the weights rounded to, as `te-models quantize` stores them (quantization-aware training):
    an export in it has the weights that the last pass used."""
    qat_activations: bool = False
    """Whether the inputs of linear layers are rounded to the format of qat, too."""
    quantized_weights: bool = False
    """Whether the weights are stored quantized as well."""
    cache_weights: bool = False
    """Whether each weight is quantized once for a step, and not in every micro-batch."""
    cpu_gemm: Literal["auto", "bf16", "float32"] = "auto"
    """Dtype in which a CPU multiplies 16-bit matrices: the faster one of the first rank's machine (auto; a continued
    run keeps it), or this one."""

    def _validate(self) -> None:
        self._check_recipe("precision")
        for name in ("quantized_weights", "cache_weights"):
            check(self.has_recipe or not getattr(self, name), f"precision.{name}", True, "false without a recipe")
        where = "false with precision.schedule, whose recipes store weights in formats of their own"
        high = f"with precision.qat = {self.qat!r} (it trains in high precision)"
        check(self.qat == "none" or self.recipe == "none", "precision.recipe", self.recipe, f"'none' {high}")
        phases = [phase.recipe for phase in self.schedule]
        check(self.qat == "none" or not self.has_recipe, "precision.schedule", phases, f"recipes 'none' {high}")
        inputs = "false, except with a format of precision.qat that GEMMs have for both operands: " + ", ".join(_BOTH)
        check(not self.qat_activations or self.qat in _BOTH, "precision.qat_activations", True, inputs)
        check(not (self.schedule and self.quantized_weights), "precision.quantized_weights", True, where)

    @property
    def recipe_names(self) -> tuple[RecipeName, ...]:
        """The recipe of each phase of the run."""
        return (self.recipe, *(phase.recipe for phase in self.schedule))

    @property
    def has_recipe(self) -> bool:
        """Whether the layers run under a recipe in any step."""
        return any(name != "none" for name in self.recipe_names)

    def check_schedule(self, steps: int) -> None:
        """Raise ConfigError unless each phase has a step of a run of `steps`, and they follow one another."""
        before = 0
        for number, phase in enumerate(self.schedule, 1):
            key = "from_share" if phase.from_step is None else "from_step"
            begin, what = phase.begin(steps), f"{key} = {getattr(phase, key)} in table {number}"
            place = f"and this one begins at step {begin + 1}"
            later = f"a phase that begins after step {before + 1}, as the phase before it does, {place}"
            check(begin > before, "precision.schedule", what, later)
            check(begin < steps, "precision.schedule", what, f"a phase within steps = {steps}, {place}")
            before = begin
