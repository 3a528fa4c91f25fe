"""Transformer Engine's porch: what exists here because Transformer Engine has it, in its names and its argument order.

The classes and functions translate what they are called with and call the core. May import: `te_models.kernels` and all
other rooms of `layers/`, none of which imports this one: only `te_models.layers` and the module paths that Transformer
Engine's scripts import (`ops`, `optimizers`, `utils`) offer its names.
"""
