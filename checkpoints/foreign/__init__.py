"""Checkpoints of training systems, read without unpickling: torch's distributed ones, Megatron-Core's, torchtitan's."""
