"""The modules with Transformer Engine's arguments: each translates its constructor's and is a layer of the core.

Users import them from `te_models.layers`.
"""
