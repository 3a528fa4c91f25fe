"""Bytes on disk: safetensors headers, weight files, atomic folders, digests, bounded buffers and threads.

May import: `te_models.kernels`, `te_models.layers`.
"""
