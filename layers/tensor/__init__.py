"""Quantized tensors: bare storages, the `torch.Tensor` subclasses around them, and what torch operations do with them.

May import: `te_models.kernels`, `..quantizer`.
"""
