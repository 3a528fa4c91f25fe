"""FP8 with scales per tensor, per block and per microscaling block: the definition, the CPU paths, the Triton kernels.

May import: torch, triton, `te_models.kernels`.
"""
