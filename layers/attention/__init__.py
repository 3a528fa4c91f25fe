"""Softmax attention and the modules around it: masks, layouts, rotary embedding, transformer layer.

May import: `te_models.kernels` and the rooms before it: quantizer, tensor, recipe, gemm, distributed, module.
"""
