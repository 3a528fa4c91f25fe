"""Recipes: frozen values that say which format each operand of fprop, dgrad and wgrad gets, and the active one.

May import: `te_models.kernels`, `..quantizer`, `..tensor`; this door also offers names of the porch, `..te`. A
program finds the function `recipe` as `te_models.layers.recipe`. It has the names below as attributes, so that `from
te_models.layers import recipe` gives `recipe.DelayedScaling`, too.
"""

from ..te.recipes import MMParams, QParams
from .base import RECIPES, Format, Recipe, recipe
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
