"""te_models."""
