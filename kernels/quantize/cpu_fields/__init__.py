"""Quantizing large matrices into stored fields on CPU in one C++ pass, and decoding FP8: with the definitions' bits."""

from .library import decode_e4m3, quantize_blocks, quantize_nvfp4, quantize_scaled, ready, worthwhile

__all__ = ["decode_e4m3", "quantize_blocks", "quantize_nvfp4", "quantize_scaled", "ready", "worthwhile"]
