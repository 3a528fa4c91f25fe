"""The layers with weights, and what they have in common: quantizers, state, primary weights.

May import: `te_models.kernels` and the rooms before it: quantizer, tensor, recipe, gemm, distributed.
"""
