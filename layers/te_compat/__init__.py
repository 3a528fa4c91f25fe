"""Names and functions of Transformer Engine that only moved scripts need.

May import: `te_models.kernels` and all rooms of `layers/` before it.
"""
