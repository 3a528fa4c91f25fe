"""Another recipe, or none, for some modules: patterns on their qualified names."""

import fnmatch
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from te_models.kernels.torch_versions import constant_when_traced
from te_models.suggestions import shown

from ..quantizer import Quantizer
from .base import GemmQuantizers, Recipe

Choice = Recipe | Literal["bf16"]


_warned: set[str] = set()  # patterns that match nothing, each said once


@constant_when_traced
def matches_pattern(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern`, in which * stands for any characters, dots included, ? for one, [...] for one of
    those inside, and [!...] for one of the others."""
    return fnmatch.fnmatchcase(name, pattern)


@dataclass(frozen=True, kw_only=True)
class PerModuleRecipe(Recipe):
    """`default`, except where a rule says otherwise: the first pattern that matches a module's name decides.

    rules: (pattern, recipe or "bf16") pairs, in order; see `matches_pattern`. "bf16" leaves the module in high
    precision. Names are as in `model.named_modules()`, which `GPTModel` gives its layers; elsewhere call
    `name_modules(model)`: a layer without a name raises ValueError where there are rules. A pattern that matches no
    layer warns once, when an `autocast` region is left in which the recipe was in force, or when `store_weights` has
    used it.

    Example:
        PerModuleRecipe(default=MXFP8BlockScaling(), rules=(("*.linear_proj", "bf16"),))
    """

    NAME: ClassVar[str] = "per_module"
    by_name: ClassVar[bool] = True
    default: Recipe
    rules: tuple[tuple[str, Choice], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rules", tuple((pattern, choice) for pattern, choice in self.rules))
        for pattern, choice in self.rules:
            if not isinstance(pattern, str) or any(c in pattern for c in "{}"):
                raise ValueError(
                    f"the pattern {pattern!r} is not supported; allowed: names with * for any characters, ? for one, "
                    "[12] for one of those; alternatives in braces are rules of their own"
                )
            if not (choice == "bf16" or isinstance(choice, Recipe)):
                raise ValueError(f"the rule for {shown(pattern)} names {shown(choice)}; allowed: a recipe, or 'bf16'")
        if not isinstance(self.default, Recipe):
            raise ValueError(f"default is {shown(self.default)}; allowed: a recipe")
        rules = tuple((pattern, c.value() if isinstance(c, Recipe) else c) for pattern, c in self.rules)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", self.default.value())
        for inner in (self.default, *(choice for _, choice in self.rules)):
            if isinstance(inner, PerModuleRecipe):
                raise ValueError("a PerModuleRecipe cannot contain another one; merge their rules")
        if self.backward_override is not None:
            raise ValueError("backward_override belongs to the recipes inside a PerModuleRecipe, not to itself")

    def for_module(self, name: str) -> Recipe | None:
        if self.rules and not name:
            raise ValueError(
                "a PerModuleRecipe with rules chooses by name, and this layer has none: pass name=... when it is "
                "built, or call name_modules(model)"
            )
        for pattern, choice in self.rules:
            if matches_pattern(pattern, name):
                return choice if isinstance(choice, Recipe) else None
        return self.default

    def check_names(self, names: Callable[[], list[str]]) -> None:
        if "_names_checked" in vars(self):
            return
        named = names()
        if not named:
            return
        object.__setattr__(self, "_names_checked", True)
        for pattern, _ in self.rules:
            if pattern not in _warned and not any(matches_pattern(pattern, name) for name in named):
                _warned.add(pattern)
                warnings.warn(
                    f"the rule for {pattern!r} of a PerModuleRecipe matches none of the {len(named)} named layers, "
                    f"such as {shown(named[0])}",
                    UserWarning,
                    stacklevel=3,
                )

    def weight_quantizer(self) -> Quantizer:
        return self.default.weight_quantizer()

    def quantizers(self, module: str, name: str) -> GemmQuantizers:
        raise TypeError("resolve a PerModuleRecipe with for_module(name) first")

    def to_dict(self) -> dict[str, Any]:
        rules = [[p, c.to_dict() if isinstance(c, Recipe) else c] for p, c in self.rules]
        return {"recipe": self.NAME, "default": self.default.to_dict(), "rules": rules}

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Self:
        values["default"] = Recipe.from_dict(values["default"])
        rules = values.get("rules", ())
        values["rules"] = tuple((p, Recipe.from_dict(c) if isinstance(c, dict) else c) for p, c in rules)
        return cls(**values)


def first_last_layers_bf16(recipe: Recipe, num_layers: int, *, first: int = 1, last: int = 1) -> PerModuleRecipe:
    """Return `recipe` with the first and last transformer layers of a `num_layers` deep model in high precision.

    ValueError if `first` and `last` together exceed num_layers.
    """
    if first < 0 or last < 0 or first + last > num_layers:
        raise ValueError(f"first={first} and last={last} layers of a model with {num_layers}; allowed: at most all")
    layers = [*range(first), *range(num_layers - last, num_layers)]
    return PerModuleRecipe(default=recipe, rules=tuple((f"*layers.{i}.*", "bf16") for i in layers))
