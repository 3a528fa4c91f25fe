"""FusedAdam and FusedSGD with Transformer Engine's arguments and state dicts, and the functions on lists of tensors.

Users import them from `te_models.layers.optimizers`.
"""
