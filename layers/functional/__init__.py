"""The dense and the grouped layer as differentiable functions of tensors and quantizers; no module is known here.

May import: `te_models.kernels`, `..quantizer`, `..tensor`, `..recipe`.
"""
