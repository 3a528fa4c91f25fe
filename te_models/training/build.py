"""Build the pieces of a run from its configuration: model, optimizer, data."""

import contextlib
from pathlib import Path
from typing import Any

import torch

from te_models.checkpoints import CheckpointError, open_checkpoint
from te_models.checkpoints.folder.provenance import provenance_source
from te_models.layers import QuantizedTensor, gradient_of, quantized_model_init, share_scales
from te_models.layers.module.base import GemmModule
from te_models.layers.tensor.fsdp import local_part, one_per_matrix

from ..catalogue import CatalogueError
from ..config import ConfigError, ModelConfig
from ..model import GPTModel
from ..model.embedding import EmbeddingTable
from ..model.moe import MoELayer
from ..model.output import OutputLayer
from ..model.pretrained.keep_in_fp32 import keep_dtypes
from ..parallel.parts import ModelParts, load_own_parts
from ..parallel.sharding import parallelize
from .checkpoints.checkpoint import TrainingState
from .checkpoints.checks import MODEL
from .config import TrainConfig
from .config.file import BALANCE
from .optimizer.adamw import Optimizer, OtherStages
from .optimizer.groups import freeze
from .optimizer.whole_matrix import divided_matrices
from .optimizer.zero import ranks_that_hold
from .precision import build_recipe
from .ranks.experts import expert_ranks
from .ranks.layout import ONE_RANK, RankLayout
from .seeding import derive_seed
from .trained import blocks_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": torch.float32}


def resolve_device(name: str) -> str:
    """Return "cpu" or "cuda". Raises ConfigError if CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device")
    return ("cuda" if available else "cpu") if name == "auto" else name


def build_model(
    config: TrainConfig,
    device: str,
    checkpoint: Path | None,
    start: TrainingState | None = None,
    layout: RankLayout = ONE_RANK,
) -> GPTModel:
    """Return the model of a checkpoint, of `model.path`, or a random one from the run's seed, as the layout divides it.

    start: what was read of `checkpoint`. The weights of a sharded checkpoint are not read yet.
    """
    model = _build_model(config, device, checkpoint, start, layout)
    for layer in model.modules() if config.parallel.moe_shared_expert_overlap else ():
        if isinstance(layer, MoELayer):
            layer.moe_shared_expert_overlap = True
    split = layout.dims.tensor_model_parallel_size, layout.dims.expert_tensor_parallel_size
    if config.precision.quantized_weights and split != (1, 1):
        check_split_weights(model)
    return model


def check_split_weights(model: GPTModel) -> None:
    """Raise ConfigError where ranks that split layers cut a block of a stored weight, or have parts of a matrix that
    has one scale."""
    where = "precision.quantized_weights is True with parallel.tensor_model_parallel_size"
    parts = ModelParts(model)
    try:
        parts.stored()
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None
    for name, parameter in model.named_parameters():
        local = local_part(parameter)
        if isinstance(local, QuantizedTensor) and one_per_matrix(local) and parts.is_split(name):
            raise ConfigError(
                f"{where}, which splits {name}, and its format has one scale per matrix; allowed: recipes with scales "
                "of blocks alone, 'block' and 'mxfp8'"
            )


def _build_model(
    config: TrainConfig, device: str, checkpoint: Path | None, start: TrainingState | None, layout: RankLayout
) -> GPTModel:
    precision = config.precision
    path = checkpoint / MODEL if checkpoint is not None else config.model.path
    dtype, experts = DTYPES[precision.dtype], config.model.expert_layout
    parts = start is not None and start.parts is not None
    if layout.dims.is_sharded or layout.stages is not None or parts:
        return _build_parts(config, device, start, None if parts else path, checkpoint is None, layout)
    if path is not None:
        weights = None
        if precision.quantized_weights:
            with open_checkpoint(path, verify=False) as source:
                weights = build_recipe(precision, source.config.num_layers)
        model = GPTModel.from_pretrained(
            path,
            dtype=dtype,
            device=device,
            recipe=weights,
            expert_layout=experts,
            device_mesh=layout.model_mesh,
            sequence_parallel=layout.sequence_parallel,
            expert_dispatch=config.parallel.expert_dispatch,
            mtp=config.model.mtp,
            # the files of a checkpoint were checked when it was chosen
            verify=checkpoint is None and config.model.verify,
        )
        return layout.share_sequences(model)
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    return random_model(config, read_model_config(config), device, layout)


def random_model(config: TrainConfig, model: ModelConfig, device: str, layout: RankLayout) -> GPTModel:
    """Return a model with the initial weights that torch's generator gives now, split as the layout says and stored
    quantized where the run stores weights so."""
    precision = config.precision
    weights = build_recipe(precision, model.num_layers) if precision.quantized_weights else None
    options = _model_options(config, layout)
    with contextlib.nullcontext() if weights is None else quantized_model_init(enabled=True, recipe=weights):
        return layout.share_sequences(GPTModel(model, dtype=DTYPES[precision.dtype], device=device, **options))


def _model_options(config: TrainConfig, layout: RankLayout) -> dict[str, Any]:
    """Return the arguments of a model that say how its experts lie, and how it is divided."""
    experts = {"expert_layout": config.model.expert_layout, "expert_dispatch": config.parallel.expert_dispatch}
    return {**experts, **layout.model_options}


def _build_parts(
    config: TrainConfig, device: str, start: TrainingState | None, path: Any, verify: bool, layout: RankLayout
) -> GPTModel:
    """Return the model part by part, so that no rank has more than one layer whole: sharded, or of a sharded
    checkpoint, whose weights are not read yet. path: the folder to read weights from; None: random ones."""
    precision = config.precision
    options: dict[str, Any] = {"dtype": DTYPES[precision.dtype], "device": "meta"}
    options |= _model_options(config, layout)
    with contextlib.ExitStack() as opened:
        source = None
        if path is not None:
            source = opened.enter_context(open_checkpoint(path, verify=verify and config.model.verify))
            model = GPTModel(source.config, **options)
            keep_dtypes(model, source.family, source.dtype_of)
        elif start is not None and start.model_config is not None:
            model = GPTModel(ModelConfig.from_dict(start.model_config), **options)
            keep_saved_dtypes(model, start)
        else:
            model = GPTModel(read_model_config(config), **options)
        weights = build_recipe(precision, model.config.num_layers) if precision.quantized_weights else None
        torch.manual_seed(derive_seed(config.seed, "initial weights"))
        try:
            model = parallelize(
                model,
                layout.mesh,
                device=device,
                fill=None if source is None and start is None else lambda part: None,
                weights=weights,
                reshard_after_forward=config.parallel.reshard_after_forward,
                reduce_dtype=getattr(torch, config.parallel.reduce_dtype),
                cpu_offload=config.parallel.cpu_offload and layout.dims.is_sharded,
                stages=layout.stages,
                cp_comm_type=layout.cp_comm_type,
            )
        except ValueError as error:  # what a shard of a quantized weight cannot be
            if weights is None or isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"precision.quantized_weights is True with {layout.dims.data_parallel_shard_size} shards: {error}"
            ) from None
        if weights is not None:
            share_scales(model)
        if source is not None:
            load_own_parts(model, source)
            model.origin, model.pretrained_folder = provenance_source(source, None), source.path
    return model


def keep_saved_dtypes(model: GPTModel, start: TrainingState) -> None:
    """Give parameters without data the dtype that a sharded checkpoint holds them in: routers may be wider."""
    from .checkpoints.sharded.checkpoint import saved_dtypes

    assert start.parts is not None
    saved = saved_dtypes(start.parts)
    for name, parameter in model.named_parameters():
        dtype = saved.get(f"model.{name}", parameter.dtype)
        if dtype in DTYPES.values():
            parameter.data = parameter.data.to(dtype)


def read_model_config(config: TrainConfig) -> ModelConfig:
    """Return the ModelConfig of a randomly initialised run."""
    if config.model.config is not None:
        return config.model.config
    if config.model.name is not None:
        return _published(config.model.name)
    path = Path(str(config.model.config_file))
    try:
        return ModelConfig.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read model.config_file {path}: {error.strerror}") from None


def _published(name: str) -> ModelConfig:
    """Return the configuration of the catalogue, its experts balanced as a file's own configuration does it."""
    try:
        model = ModelConfig.from_catalogue(name)
    except CatalogueError as error:
        raise ConfigError(f"model.name: {error}") from None
    moe = model.moe
    if moe is None or moe.router.expert_bias or moe.aux_loss_coeff:
        return model
    return model.replace(moe=moe.replace(aux_loss_coeff=BALANCE))


def build_optimizer(config: TrainConfig, model: GPTModel, layout: RankLayout = ONE_RANK) -> Optimizer:
    """Return the optimizer of the model, whose frozen parameters this marks. Quantized weights, or with
    `master_weights` all of fewer bits, get masters.

    Where `needs_main_grads`, the parameters get main gradients, and the layers that are not sharded accumulate into
    them.
    """
    everywhere = None if model.whole is None else dict(model.whole.named_parameters())
    freeze(model, config.optimizer.freeze, everywhere)
    sharded = layout.dims.is_sharded  # whose gradients arrive as the ranks' averages
    # FSDP2 adds the micro-batches of a step up in float32 where it reduces once
    once = sharded and layout.stages is None and config.parallel.reduces_once
    micro_batches = 1 if once else config.data.gradient_accumulation
    micro_batches *= 1 if sharded else layout.gradients.world_size
    main_grads = needs_main_grads(config, micro_batches)
    for module in model.modules() if main_grads and not sharded else ():
        if isinstance(module, GemmModule | EmbeddingTable | OutputLayer):
            module.fuse_wgrad_accumulation = True
    for parameter in model.parameters() if main_grads and not sharded and layout.stages is not None else ():
        # a schedule runs all micro-batches, so that nobody else adds up what each leaves in `.grad`
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
    parts = None if layout.mesh is None else ModelParts(model)
    experts = expert_ranks(model.expert_parameters(), layout.mesh)
    stages = None if layout.mesh is None else layout.mesh.stages
    shared = config.parallel.use_distributed_optimizer and layout.gradients.world_size > 1
    return Optimizer(
        model.named_parameters(),
        config.optimizer,
        seed=derive_seed(config.seed, "optimizer moments"),
        compile=config.compile,
        experts=experts,
        stages=None if stages is None else OtherStages(stages, names_counted_elsewhere(model)),
        groups=None if parts is None else parts.groups(),
        main_grads=main_grads,
        divided=None if parts is None or config.optimizer.kind != "muon" else divided_matrices(parts),
        blocks=blocks_of(model.config, model.expert_layout),
        everywhere=everywhere,
        own=None if parts is None or not config.optimizer.needs_parts else parts.stored(),
        held_by=ranks_that_hold(layout.gradients, experts) if shared else None,
    )


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    gradient_of(parameter)


def names_counted_elsewhere(model: GPTModel) -> set[str]:
    """Return the parameters of this rank that the norm of the gradients counts on another one: of a last pipeline stage
    that shares the embedding's weight with the first, of a later one that shares blocks with it."""
    if model.pre_process:
        return set()
    shared = "decoder.shared_blocks."
    found = {name for name, _ in model.named_parameters() if name.startswith(shared)}
    return found if model.embedding is None else found | {"embedding.word_embeddings.weight"}


def needs_main_grads(config: TrainConfig, micro_batches: int) -> bool:
    """Return whether a step of this many micro-batches on all ranks adds its gradients up in `main_grad`: where
    `.grad`, or the product that becomes it, has fewer bits than float32."""
    in_float32 = config.precision.dtype == "fp32" and not config.precision.has_recipe
    return config.optimizer.accumulate_allreduce_grads_in_fp32 and micro_batches > 1 and not in_float32
