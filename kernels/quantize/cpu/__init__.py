"""Quantizing on a CPU in one C++ pass, with the definitions' bits: rounded for a GEMM, or into fields that it reads."""
