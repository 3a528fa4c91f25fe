"""Fusible operations: small differentiable steps that `Sequential` fuses, with quantized data between them.

Users import them from `te_models.layers.ops`.
"""
