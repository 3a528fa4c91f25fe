"""The plan of a conversion: which parts of which stored tensor make each output tensor, decided before data moves.

May import: `te_models.layers`, `te_models.config`, `..io`.
"""
