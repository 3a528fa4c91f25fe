"""Recipes: frozen values that say which format each operand of fprop, dgrad and wgrad gets, and the active one.

May import: `te_models.kernels`, `..quantizer`, `..tensor`.
"""

from .base import Format, Recipe
from .recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
]
