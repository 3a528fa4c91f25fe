"""NVFP4: the definition, the CPU paths, the Triton kernels.

May import: torch, triton, `te_models.kernels`.
"""
