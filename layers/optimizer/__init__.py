"""FusedAdamW: float32 masters, moments in few bits, requantization of primary weights inside the step.

May import: `te_models.kernels`, `..quantizer`, `..tensor`.
"""
