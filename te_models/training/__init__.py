"""Training: configuration, token data, schedules, AdamW, resumable checkpoints, metrics, and the loop that uses them.

Start reading at `loop.py`; `setup.py` is what happens before its first step, `step.py` one step. May import everything
of te_models; nothing but the command line imports it. Names are imported on first use: the configuration can be read,
and its keys listed, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .callbacks import Callback, CallbackError, PushToHub, RunView, model_card, push_to_hub
    from .checkpoints.checks import TrainingCheckpointError
    from .checkpoints.files import latest_checkpoint, list_checkpoints
    from .config import (
        CheckpointConfig,
        DataConfig,
        DiLoCoConfig,
        EvaluationConfig,
        HubConfig,
        LogConfig,
        LoRAConfig,
        ModelSource,
        OptimizerConfig,
        ParallelConfig,
        PosttrainingConfig,
        PrecisionConfig,
        ProfileConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from .config.file import load_config
    from .data.dataset import TokenDataset
    from .data.errors import DataError
    from .data.options import DocumentOptions
    from .data.tokenize import build_dataset
    from .data.windows import Windows
    from .data.writer import write_dataset
    from .log.curves import plot_loss
    from .loop import TrainResult, train
    from .metrics import MetricsError, read_metrics
    from .optimizer.schedule import lr_at
    from .ranks.monitor import LostRankError
    from .step import TrainingError

__all__ = [
    "Callback",
    "CallbackError",
    "CheckpointConfig",
    "DataConfig",
    "DataError",
    "DiLoCoConfig",
    "DocumentOptions",
    "EvaluationConfig",
    "HubConfig",
    "LoRAConfig",
    "LogConfig",
    "LostRankError",
    "MetricsError",
    "ModelSource",
    "OptimizerConfig",
    "ParallelConfig",
    "PosttrainingConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "PushToHub",
    "RunView",
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
    "model_card",
    "plot_loss",
    "push_to_hub",
    "read_metrics",
    "train",
    "write_dataset",
]

__getattr__, __dir__ = lazy_names(__name__)
