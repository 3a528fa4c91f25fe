"""Objectives of post-training: preference pairs (`dpo`), and what a teacher says (`distillation`).

`frozen` computes what an objective takes of a model that is not trained. May import everything of `training` but the
loop and its set-up.
"""

from .distillation import Distillation, check_teacher, load_teacher
from .dpo import DPO, reference_of

__all__ = ["DPO", "Distillation", "check_teacher", "load_teacher", "reference_of"]
