"""A checkpoint folder, opened: its kind, its configuration, its tensors, and where they came from.

May import: `te_models.layers`, `te_models.config`, `..io`, `..plan`, `..formats`, `..families`.
"""
