"""Training checkpoints: written, checked and continued from."""
