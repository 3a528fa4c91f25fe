"""Training: configuration, token data, schedules, AdamW, resumable checkpoints, metrics, and the loop that uses them.

Start reading at `loop.py`. May import everything of te_models; nothing but the command line imports it.
"""

from .checkpoints.checkpoint import TrainingCheckpointError, latest_checkpoint, list_checkpoints
from .config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelSource,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
    load_config,
)
from .data.build import build_dataset, write_dataset
from .data.dataset import TokenDataset, Windows
from .data.token_file import DataError
from .loop import TrainResult, train
from .metrics import MetricsError, plot_loss, read_metrics
from .optimizer.schedule import lr_at
from .ranks.monitor import LostRankError
from .step import TrainingError

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DataError",
    "EvaluationConfig",
    "LogConfig",
    "LostRankError",
    "MetricsError",
    "ModelSource",
    "OptimizerConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "TokenDataset",
    "TrainConfig",
    "TrainResult",
    "TrainingCheckpointError",
    "TrainingError",
    "Windows",
    "build_dataset",
    "latest_checkpoint",
    "list_checkpoints",
    "load_config",
    "lr_at",
    "plot_loss",
    "read_metrics",
    "train",
    "write_dataset",
]
