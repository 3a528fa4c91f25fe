"""Quantized Hugging Face folders in and out: what moves as it is, what is encoded, requantized or dequantized.

May import: `te_models.layers`, `te_models.config`, and the rooms before it: io, plan, formats, families, folder, write.
"""
