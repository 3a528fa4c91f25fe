"""Callbacks of a run: what others' code is told of it, evaluations by it, and the upload of the result.

May import everything of `training` but the loop and its set-up.
"""

from .callback import Callback, CallbackError, Callbacks, RunView
from .evaluations import Evaluation, Evaluations
from .hub import PushToHub, model_card, push_to_hub
from .installed import load_installed

__all__ = [
    "Callback",
    "CallbackError",
    "Callbacks",
    "Evaluation",
    "Evaluations",
    "PushToHub",
    "RunView",
    "load_installed",
    "model_card",
    "push_to_hub",
]
