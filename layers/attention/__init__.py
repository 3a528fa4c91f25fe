"""Softmax attention over given queries, keys and values: masks, windows, and where rows stand in their sequences.

May import: `te_models.kernels` and the rooms before it: quantizer, tensor, recipe, gemm, distributed, module.
"""
