"""The configuration of a run: a table of its TOML file is a class, one file for tables that belong together.

`run` puts the tables together, `file` reads them, `overrides` makes options of their keys.
"""

from .optimizer import DiLoCoConfig, LoRAConfig, OptimizerConfig, ScheduleConfig
from .output import CheckpointConfig, EvaluationConfig, HubConfig, LogConfig, ProfileConfig
from .parallel import ParallelConfig
from .posttraining import PosttrainingConfig
from .precision import PrecisionConfig
from .run import TrainConfig
from .source import DataConfig, ModelSource

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DiLoCoConfig",
    "EvaluationConfig",
    "HubConfig",
    "LoRAConfig",
    "LogConfig",
    "ModelSource",
    "OptimizerConfig",
    "ParallelConfig",
    "PosttrainingConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "ScheduleConfig",
    "TrainConfig",
]
