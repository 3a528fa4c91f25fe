"""Compiling a model: one way to do it, the same on all ranks, and a report of graphs and recompilations.

May import: `te_models.kernels`, `te_models.layers`.
"""
