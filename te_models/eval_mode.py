"""Evaluation mode for the length of a block, after which every module is in the mode it was in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode; at the end, the modules that were not into training mode again.

    `model.train(was_training)` would also put modules into training mode that a user had taken out of it (a frozen part
    without dropout), and takes a millisecond for 30 layers, where nothing is to be done.
    """
    training = [module for model in models for module in model.modules() if module.training]
    if training:
        for model in models:
            model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
