"""Build the pieces of a run from its configuration: model, optimizer, data."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_models.checkpoints import open_checkpoint
from te_models.layers import quantized_model_init
from te_models.layers.module.base import GemmModule

from ..config import ConfigError, ModelConfig
from ..model import GPTModel
from ..model.embedding import Table
from ..model.output import OutputLayer
from .config import DataConfig, TrainConfig
from .data.build import build_dataset
from .data.dataset import TokenDataset, read_meta
from .data.token_file import DataError
from .optimizer.adamw import Optimizer
from .precision import build_recipe
from .ranks.experts import expert_ranks
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
        experts = None if mesh is None else mesh["ep"]
        return GPTModel.from_pretrained(
            path,
            dtype=dtype,
            device=device,
            recipe=weights,
            expert_layout=layout,
            device_mesh=experts,
            # the files of a checkpoint were checked when it was chosen
            verify=checkpoint is None and config.model.verify,
        )
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    model_config = read_model_config(config)
    weights = build_recipe(precision, model_config.num_layers) if precision.quantized_weights else None
    with contextlib.nullcontext() if weights is None else quantized_model_init(enabled=True, recipe=weights):
        group = None if mesh is None else mesh.get_group("ep")
        return GPTModel(model_config, dtype=dtype, device=device, expert_layout=layout, ep_group=group)


def read_model_config(config: TrainConfig) -> ModelConfig:
    """Return the ModelConfig of a randomly initialised run."""
    if config.model.config is not None:
        return config.model.config
    path = Path(str(config.model.config_file))
    try:
        return ModelConfig.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read model.config_file {path}: {error.strerror}") from None


def build_optimizer(
    config: TrainConfig, model: GPTModel, mesh: DeviceMesh | None = None, *, world_size: int = 1
) -> Optimizer:
    """Return AdamW for the model; quantized weights, or with `master_weights` all of fewer bits, get masters.

    world_size: the ranks whose gradients are averaged. Where `needs_main_grads`, the parameters get main gradients and
    the model's layers accumulate into them.
    """
    main_grads = needs_main_grads(config, config.data.gradient_accumulation * world_size)
    for module in model.modules() if main_grads else ():
        if isinstance(module, GemmModule | Table | OutputLayer):
            module.fuse_wgrad_accumulation = True
    return Optimizer(
        model.named_parameters(),
        config.optimizer,
        seed=derive_seed(config.seed, "optimizer moments"),
        compile=config.compile,
        experts=expert_ranks(model.expert_parameters(), mesh),
        main_grads=main_grads,
    )


def needs_main_grads(config: TrainConfig, micro_batches: int) -> bool:
    """Return whether a step of so many micro-batches on all ranks adds its gradients up in `main_grad`: where `.grad`,
    or the product that becomes it, has fewer bits than float32."""
    in_float32 = config.precision.dtype == "fp32" and config.precision.recipe == "none"
    return config.optimizer.accumulate_allreduce_grads_in_fp32 and micro_batches > 1 and not in_float32


def open_data(config: DataConfig, *, vocab_size: int, may_build: bool) -> TokenDataset:
    """Open the data set at `data.path`, building it from `data.text` first if it is absent.

    Raises DataError if it was built from other text, or has token ids that the model does not know.
    """
    if config.text and may_build and not Path(config.path).exists():
        build_dataset(config.path, config.text, str(config.tokenizer))
    dataset = TokenDataset.open(config.path)
    check_dataset(dataset, config, vocab_size)
    return dataset


def check_dataset(dataset: TokenDataset, config: DataConfig, vocab_size: int) -> None:
    """Raise DataError for a data set of other text, another tokenizer or a larger vocabulary than the run's."""
    if config.text:
        source = read_meta(dataset.path).get("source") or {}
        if (source.get("text"), source.get("tokenizer")) != (list(config.text), config.tokenizer):
            raise DataError(
                f"{config.path} was built from other text or another tokenizer than data.text and data.tokenizer"
            )
    check_vocabulary(config.path, dataset.vocab_size, vocab_size)


def check_vocabulary(what: str, size: int, vocab_size: int) -> None:
    """Raise DataError where token ids can be beyond the model's vocabulary of `vocab_size`."""
    if size > vocab_size:
        raise DataError(f"{what} has a vocabulary of {size} tokens, the model one of {vocab_size}")
