"""Recipes: frozen values that say which format each operand of fprop, dgrad and wgrad gets, and the active one.

May import: `te_models.kernels`, `..quantizer`, `..tensor`.
"""
