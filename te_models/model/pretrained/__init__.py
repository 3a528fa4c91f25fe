"""Saving and loading models: in memory, sharded, split over ranks; folders are written by `te_models.checkpoints`.

May import: `te_models.layers`, `te_models.checkpoints`, `te_models.config`.
"""
