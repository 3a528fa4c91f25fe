"""The model of a training checkpoint as an ordinary folder, without the run: one process, a tensor at a time."""

from pathlib import Path

import torch

from te_models.checkpoints import reshard

from ..config import ModelConfig
from ..model import GPTModel
from .build import DTYPES, keep_saved_dtypes, random_model
from .checkpoints.checkpoint import TrainingState, load_state
from .checkpoints.checks import MODEL
from .config import TrainConfig
from .lora import ADAPTERS, Adapters
from .ranks.layout import ONE_RANK


def export_alone(folder: Path, out: Path) -> None:
    """Write the model of a checkpoint to a new te_models folder, with its adapters merged; every byte
    of the checkpoint is checked first.

    The tokenizer is that of the folder that training began with, where that is still there. Raises
    TrainingCheckpointError for a checkpoint that cannot be used, CheckpointError where the folder cannot be written.
    """
    start = load_state(folder)
    config = TrainConfig.from_dict(start.config)
    if start.parts is None:
        if not config.lora.rank:
            reshard(folder / MODEL, out, verify=False, overwrite=True)
            return
        dtype = DTYPES[config.precision.dtype]
        model = GPTModel.from_pretrained(folder / MODEL, dtype=dtype, verify=False)
        adapters = Adapters(config, model)
        for name, value in adapters.state_tensors().items():
            value.copy_(start.tensors[name])
        adapters.merge()
        model.save_pretrained(out)
        return
    _export_parts(start, config, out)


def _export_parts(start: TrainingState, config: TrainConfig, out: Path) -> None:
    from .checkpoints.sharded.checkpoint import export_parts, read_wholes

    assert start.parts is not None and start.model_config is not None, "a sharded checkpoint"
    model = random_model(config, ModelConfig.from_dict(start.model_config), "meta", ONE_RANK)
    keep_saved_dtypes(model, start)
    merged = None
    if config.lora.rank:
        adapters = Adapters(config, model).of_whole_model(read_wholes(start.parts, ADAPTERS))
        merged = adapters.merged_weights()
    source = config.model.path if config.model.path and Path(config.model.path).is_dir() else None
    with torch.no_grad():
        export_parts(start.parts, model, out, source, merged=merged)
