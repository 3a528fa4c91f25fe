"""What users call: convert, quantize, reshard, upcycle, verify, diff, inspect, save.

May import: `te_models.layers`, `te_models.config`, and all other rooms of `checkpoints/`.
"""
