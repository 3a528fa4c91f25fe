"""Checkpoints that every rank writes its own part of, through torch.distributed.checkpoint and without a pickle."""
