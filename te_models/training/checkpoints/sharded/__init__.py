"""Checkpoints that every rank writes its own part of, at any number of ranks, and without a pickle."""
