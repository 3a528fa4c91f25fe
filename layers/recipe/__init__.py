"""Recipes: frozen values that say which format each operand of fprop, dgrad and wgrad gets, and the active one.

May import: `te_models.kernels`, `..quantizer`, `..tensor`. Transformer Engine: `transformer_engine.common.recipe`. A
program finds the function `recipe` as `te_models.layers.recipe`. It has the names below as attributes, so that `from
te_models.layers import recipe` gives `recipe.DelayedScaling`, too.
"""

from .base import RECIPES, Format, MMParams, QParams, Recipe, recipe
from .recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

__all__ = [
    "RECIPES",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "recipe",
]

for _name in __all__:
    setattr(recipe, _name, globals()[_name])
