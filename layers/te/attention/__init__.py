"""Attention with its projections, and the transformer layer around it.

Users import both from `te_models.layers`.
"""
