"""The six recipes of the compile matrices, and a new but equal object of each."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bench.recipes import CUSTOM
from bench.recipes import NAMES as RECIPES
from te_models.layers import Recipe, quantized_model_init, recipe

NAMES = [None, *RECIPES]
"""None: no recipe."""


def fresh(name: str | None) -> Recipe | None:
    """Return a new object that equals every other of this name; for "custom", whose value is its identity, the one."""
    if name is None or name == "custom":
        return CUSTOM if name else None
    return Recipe.from_json(recipe(name).to_json())


def build_stored(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """Return a module whose weights are stored in the recipe's format."""
    with quantized_model_init(recipe=fresh(name)):
        return build()
