"""Tensor and expert parallelism of layers: process groups, shards of weights, and what ranks tell each other.

May import: `te_models.kernels`, `..quantizer`, `..tensor`, `..recipe`, `..gemm`.
"""
