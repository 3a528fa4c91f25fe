"""Quantizers and quantized tensors as arguments and results of registered operations.

May import: `te_models.kernels`, `..quantizer`, `..tensor`.
"""
