"""Build the pieces of a run from its configuration: model, optimizer, data."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_models.checkpoints import open_checkpoint
from te_models.layers import quantized_model_init

from ..config import ConfigError, ModelConfig
from ..model import GPTModel
from .build_data import build_dataset
from .config import DataConfig, TrainConfig
from .data import DataError, TokenDataset, read_meta
from .expert_ranks import expert_ranks
from .optimizer import Optimizer
from .precision import build_recipe
from .seeding import derive_seed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": torch.float32}


def resolve_device(name: str) -> str:
    """Return "cpu" or "cuda". Raises ConfigError if CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device")
    return ("cuda" if available else "cpu") if name == "auto" else name


def build_model(config: TrainConfig, device: str, checkpoint: Path | None, mesh: DeviceMesh | None = None) -> GPTModel:
    """Return the model of a checkpoint, of `model.path`, or a random one from the run's seed.

    mesh: distributes its experts, over the dimension "ep".
    """
    precision = config.precision
    path = checkpoint / "model" if checkpoint is not None else config.model.path
    dtype, layout = DTYPES[precision.dtype], config.model.expert_layout
    if path is not None:
        weights = None
        if precision.quantized_weights:
            with open_checkpoint(path) as source:
                weights = build_recipe(precision, source.config.num_layers)
        return GPTModel.from_pretrained(
            path, dtype=dtype, device=device, recipe=weights, expert_layout=layout, device_mesh=mesh
        )
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    model_config = read_model_config(config)
    weights = build_recipe(precision, model_config.num_layers) if precision.quantized_weights else None
    with contextlib.nullcontext() if weights is None else quantized_model_init(enabled=True, recipe=weights):
        group = None if mesh is None else mesh.get_group("ep")
        return GPTModel(model_config, params_dtype=dtype, device=device, expert_layout=layout, ep_group=group)


def read_model_config(config: TrainConfig) -> ModelConfig:
    """Return the ModelConfig of a randomly initialised run."""
    if config.model.config is not None:
        return config.model.config
    path = Path(str(config.model.config_file))
    try:
        return ModelConfig.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read model.config_file {path}: {error.strerror}") from None


def build_optimizer(config: TrainConfig, model: GPTModel, mesh: DeviceMesh | None = None) -> Optimizer:
    """Return AdamW for the model; quantized weights, or with `master_weights` all of fewer bits, get masters."""
    seed = derive_seed(config.seed, "optimizer moments")
    experts = expert_ranks(model.expert_parameters(), mesh)
    return Optimizer(model.named_parameters(), config.optimizer, seed=seed, compile=config.compile, experts=experts)


def open_data(config: DataConfig, *, vocab_size: int, may_build: bool) -> TokenDataset:
    """Open the data set at `data.path`, building it from `data.text` first if it is absent.

    Raises DataError if it was built from other text, or has token ids that the model does not know.
    """
    if config.text and may_build and not Path(config.path).exists():
        build_dataset(config.path, config.text, str(config.tokenizer))
    dataset = TokenDataset.open(config.path)
    if config.text:
        source = read_meta(dataset.path).get("source") or {}
        if (source.get("text"), source.get("tokenizer")) != (list(config.text), config.tokenizer):
            raise DataError(
                f"{config.path} was built from other text or another tokenizer than data.text and data.tokenizer"
            )
    if dataset.vocab_size > vocab_size:
        raise DataError(f"{config.path} has a vocabulary of {dataset.vocab_size} tokens, the model one of {vocab_size}")
    return dataset
