"""From the configuration's number formats to the recipe that the layers run under."""

from __future__ import annotations

import json
from typing import Any

from te_models.layers import PerModuleRecipe, Recipe, first_last_layers_bf16, recipe

from ..config import ConfigError, check
from .config import PrecisionConfig

_AS_JSON = {"True": "true", "False": "false", "None": "null"}  # as recipes are written in Python


def build_recipe(precision: PrecisionConfig, num_layers: int) -> Recipe | None:
    """Return the recipe that `precision` describes for a model of `num_layers` layers; None: high precision.

    Raises ConfigError naming the field.
    """
    if precision.recipe == "none":
        return None
    options: dict[str, Any] = {}
    for text in precision.recipe_options:
        name, _, value = text.partition("=")
        try:
            options[name] = json.loads(_AS_JSON.get(value, value))
        except json.JSONDecodeError:
            options[name] = value
    try:
        chosen = Recipe.from_dict({"recipe": precision.recipe} | options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"precision.recipe_options: {error}") from None
    rules = [_rule(text) for text in precision.overrides]
    first, last = precision.first_layers_bf16, precision.last_layers_bf16
    check(
        first + last <= num_layers,
        "precision.first_layers_bf16 + last_layers_bf16",
        first + last,
        f"at most the {num_layers} layers",
    )
    if first or last:
        rules += first_last_layers_bf16(chosen, num_layers, first=first, last=last).rules
    try:
        return PerModuleRecipe(default=chosen, rules=tuple(rules)) if rules else chosen
    except ValueError as error:
        raise ConfigError(f"precision.overrides: {error}") from None


def _rule(text: str) -> tuple[str, Any]:
    pattern, _, name = text.rpartition("=")
    try:
        return pattern, "bf16" if name == "bf16" else recipe(name)
    except (TypeError, ValueError):
        raise ConfigError(
            f"precision.overrides has {text!r}; allowed after the last '=': 'bf16' or the name of a recipe"
        ) from None
