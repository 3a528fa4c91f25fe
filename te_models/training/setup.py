"""What a run consists of when its first step begins: where it starts, its data, model, optimizer and files.

The order matters. What can be refused is refused before weights are read and before anything is written, and every
rank takes the same turns, because some of them communicate.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from te_models.checkpoints.tools.quantize import quantizer_named
from te_models.layers import set_rounding_seed
from te_models.layers.module.model_state import quantized_modules
from te_models.layers.module.weight_cache import forget_cached_weights

from ..config import ConfigError, ModelConfig
from ..model import GPTModel
from ..model.parallel import free_gathered_parameters
from ..model.recompute import matching_modules, recompute_modules, save_results
from ..parallel.parts import ModelParts
from ..parallel.pipeline import Pipeline
from ..terminal import say
from .build import build_model, build_optimizer
from .checkpoints.background import BackgroundWriter
from .checkpoints.checkpoint import TrainingState
from .checkpoints.old_recipes import each_stage
from .checkpoints.recipes import complete_recipe_state
from .checkpoints.saving import Saving
from .checkpoints.start import (
    check_same_data,
    check_same_run,
    naming_the_intact,
    open_start,
    restore_generators,
    set_newer_aside,
)
from .config import ModelSource, TrainConfig
from .data.batch_size import BatchSize, batch_size, with_global_batch
from .data.blend import Blend
from .log.starts import record_start
from .log.writers import MetricsWriter, open_writers
from .lora import Adapters
from .metrics import METRICS, read_metrics
from .objective import Objective
from .one_run import alone_in
from .optimizer.adamw import Optimizer
from .optimizer.diloco import OuterOptimizer
from .optimizer.learning_rate import continued_config
from .optimizer.qk_clip import QKClip
from .posttraining import DPO, Distillation, load_teacher, reference_of
from .precision import RecipeSchedule, RoundedWeights, cpu_gemm_of_run
from .preflight import check_output, check_run
from .progress import Progress
from .ranks.agreement import check_folder_is_shared, check_same_settings
from .ranks.data_parallel import Ranks, barrier
from .ranks.layout import RankLayout, balanced, rank_layout
from .ranks.reduction import Reduction
from .run_data import (
    RunData,
    ValidationBatches,
    open_data,
    training_windows,
    validation_batches,
    validation_windows,
)
from .seeding import derive_seed, rounding_seed, seed_all
from .step import LossFunction, make_loss_function, make_pipeline, make_weight_cache


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A run that is ready for its next step. `step` are finished, and `position` examples of the data are read.

    Attributes:
        config: The configuration, its schedule continued where the run is extended.
        output_dir: The folder of the run.
        checkpoint: The folder that the run continues from; None: it begins.
        digest: The digest of the training data.
        validation: The validation batches of this rank, by the name of their set.
        quantize_weights: Is called before the micro-batches of a step; None: nothing is.
        recipes: The recipes of its steps.
        qk_clip: Clips the logits of attention after each step; None: nothing does.
        outer: Joins the replicas after their inner steps; None: there are none.
        rounded: What training and validation passes run in: it rounds the weights to the format of precision.qat.
        stage: What the seed of dropout also depends on: the pipeline stage, where there are any.
        writers: What gets the row of each step: the file of the metrics first; on other ranks than 0 nothing.
    """

    config: TrainConfig
    output_dir: Path
    checkpoint: Path | None
    step: int
    position: int
    layout: RankLayout
    model_config: ModelConfig
    digest: str
    batch: BatchSize
    windows: Blend
    validation: dict[str, ValidationBatches]
    model: GPTModel
    adapters: Adapters | None
    optimizer: Optimizer
    saving: Saving
    loss_function: LossFunction | Pipeline
    reduction: Reduction
    objective: Objective
    quantize_weights: Callable[[], None] | None
    recipes: RecipeSchedule
    rounded: Callable[[], contextlib.AbstractContextManager[None]]
    qk_clip: QKClip | None
    outer: OuterOptimizer | None
    stage: tuple[Any, ...]
    writers: list[MetricsWriter]
    progress: Progress

    @property
    def step_ranks(self) -> Ranks:
        """The ranks whose gradients and losses a step averages: a replica's alone, where steps are local."""
        return self.layout.gradients if self.outer is None else self.outer.replica

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the model be what is measured and written, see `Optimizer.averaged`, inside."""
        with contextlib.nullcontext() if self.outer is None else self.outer.averaged(), self.optimizer.averaged():
            yield
            # gathered weights that an evaluation left would be used by the next pass
            free_gathered_parameters(self.model)

    def forget_weights(self) -> None:
        """Forget the weights that a recipe quantized for its steps, when another one follows it."""
        for _, module in quantized_modules(self.model):
            forget_cached_weights(module)


def set_up(config: TrainConfig, device: str, ranks: Ranks, opened: contextlib.ExitStack) -> SetUp:
    """Make or read everything that a run needs. What is to be closed at its end is entered in `opened`."""
    # Where to start: from a checkpoint, or from nothing.
    output_dir = Path(config.output_dir)
    progress = opened.enter_context(
        Progress(config.steps, shown=ranks.is_main and config.log.progress, every=config.log.every)
    )
    if config.resume_from or (output_dir / "checkpoints").exists():
        progress.waiting("checking the checkpoint to continue from")
    check_same_settings(config, ranks)
    if ranks.is_main:
        check_output(output_dir)
        opened.enter_context(alone_in(output_dir))
    barrier(ranks)  # what no other run changes any more is looked for
    check_folder_is_shared(output_dir, ranks)
    layout = rank_layout(config.parallel, ranks, device)
    data_ranks = layout.data
    config = with_global_batch(config, data_ranks.world_size)
    batch = batch_size(config.data, data_ranks.world_size)
    checkpoint, start = open_start(config, output_dir, ranks)
    if start:
        check_same_run(config, start, data_ranks)
        config = continued_config(config, start.config, start.step)
    config = opened.enter_context(cpu_gemm_of_run(config, start, ranks, device))
    step, position = (start.step, start.position) if start else (0, 0)
    model_config, notes = check_run(config, start, checkpoint, device, layout.dims, reads_text=ranks.is_main)
    layout = balanced(layout, config, model_config)
    if ranks.is_main:
        read_metrics(output_dir / METRICS)  # a damaged one is refused now, and not when the loss is drawn
    config = with_loss_chunk(config, start, model_config.vocab_size)
    for note in notes if ranks.is_main else ():
        say(f"note: {note}")

    # Data.
    data = _open_data(config, model_config, ranks, progress)
    digest = check_same_data(data, start, ranks)
    windows = training_windows(config, data, batch)
    validation = {
        name: validation_batches(config, parts, data_ranks, name)
        for name, parts in validation_windows(config, data).items()
    }

    # Model and optimizer.
    source = checkpoint or config.model.path
    progress.waiting(f"loading {source}" if source else "making a model of random weights")
    with naming_the_intact(checkpoint, output_dir):
        model = build_model(config, device, checkpoint, start, layout)
    set_loss_options(model, config.model)
    adapters = Adapters(config, model) if config.lora.rank else None
    optimizer = build_optimizer(config, model, layout)
    writer, group = (
        (BackgroundWriter(), group_of_writers(ranks, config)) if config.checkpoint.async_save else (None, None)
    )
    saving = Saving(output_dir, model, optimizer, layout, ranks, config.model.path, checkpoint, writer, group, adapters)
    opened.callback(saving.leave)
    if start:
        with naming_the_intact(checkpoint, output_dir):
            saving.restore(start)
    outer = OuterOptimizer(config.diloco, optimizer, layout.gradients) if config.diloco.inner_steps else None
    if start and outer is not None:
        outer.restore(start)
    objective = objective_of(config, model, device, layout)
    recipes = RecipeSchedule(config.precision, config.steps, model_config.num_layers)
    recipes.enter(max(0, step - 1))  # of the last step: a run that begins with the next one's says so
    loss_function = _loss_function(config, model, device, layout, objective, recipes)
    same_layers = None if layout.mesh is None else layout.mesh.same_layers
    quantize_weights = make_weight_cache(model, config.precision, device, same_layers, recipes)
    once, staged = config.parallel.reduces_once, layout.stages is not None
    gradients = layout.gradients if outer is None else outer.replica
    reduction = Reduction(optimizer, gradients, model, once=once and not staged, overlaps=not staged)
    # a layer's stream is the same in whichever stage the layer is, and another on each rank that has it
    set_rounding_seed(model.whole or model, rounding_seed(config.seed, ranks.rank % each_stage(layout.dims)))
    stages = None if layout.mesh is None else layout.mesh.stages
    stage = () if stages is None else ("stage", stages.rank())  # whose dropout is its own
    seed_all(derive_seed(config.seed, "run", layout.gradients.rank, *stage))
    if start:
        live = complete_recipe_state(model, recipes.used(step))
        with naming_the_intact(checkpoint, output_dir):
            restore_generators(start, ranks, model, layout.dims, live)

    threshold = config.optimizer.qk_clip_threshold

    # Files and progress: rank 0 only.
    output_dir.mkdir(parents=True, exist_ok=True)
    writers: list[MetricsWriter] = []
    if ranks.is_main:
        if checkpoint is not None and config.resume_from is not None:
            set_newer_aside(checkpoint, step, output_dir)
        record_start(output_dir, config, step, device, ranks.world_size)
        writers = [opened.enter_context(writer) for writer in open_writers(config, output_dir, step)]
    return SetUp(
        config=config,
        output_dir=output_dir,
        checkpoint=checkpoint,
        step=step,
        position=position,
        layout=layout,
        model_config=model_config,
        digest=digest,
        batch=batch,
        windows=windows,
        validation=validation,
        model=model,
        adapters=adapters,
        optimizer=optimizer,
        saving=saving,
        loss_function=loss_function,
        reduction=reduction,
        objective=objective,
        quantize_weights=quantize_weights,
        recipes=recipes,
        rounded=rounded_weights(config, model, layout),
        qk_clip=None if threshold is None else QKClip(model, threshold, layout.gradients, ranks),
        outer=outer,
        stage=stage,
        writers=writers,
        progress=progress,
    )


def _open_data(config: TrainConfig, model: ModelConfig, ranks: Ranks, progress: Progress) -> RunData:
    """Open the data sets of a run on all ranks, behind rank 0, which may have to build the one at `data.path`."""
    if ranks.is_main:
        if config.data.path is not None and not Path(config.data.path).exists():
            progress.waiting(f"tokenizing data.text into {config.data.path}")
        data = open_data(config, vocab_size=model.vocab_size, may_build=True)
    barrier(ranks)
    if not ranks.is_main:
        data = open_data(config, vocab_size=model.vocab_size, may_build=False)
    return data


def _loss_function(
    config: TrainConfig, model: GPTModel, device: str, layout: RankLayout, objective: Objective, recipes: RecipeSchedule
) -> LossFunction | Pipeline:
    """Return what computes the loss of a micro-batch, or the pipeline that has the model's stages."""
    if layout.stages is not None:
        return make_pipeline(model, config, device, layout, recipes)
    return make_loss_function(
        model,
        config.precision,
        device,
        compiled=config.compile,
        mode=config.compile_mode,
        async_tensor_parallel=config.parallel.async_tensor_parallel,
        objective=objective,
        recipes=recipes,
        offloaded=config.model.activation_offloading,
    )


def objective_of(config: TrainConfig, model: GPTModel, device: str, layout: RankLayout) -> Objective:
    """Return what the run minimises: with its teacher, where it has one; for pairs, with a reference that has the
    weights the run began with, also where it continues."""
    if config.posttraining.method == "none":
        return Objective()
    compiled: dict[str, Any] = {"compiled": config.compile, "mode": config.compile_mode}
    if config.posttraining.method == "distill":
        return Distillation(config, load_teacher(config, device), **compiled)
    copy = None
    if not config.lora.rank:
        copy = build_model(config, device, None, None, layout).requires_grad_(False)
        set_loss_options(copy, config.model)
    return DPO(config.posttraining, reference_of(model, copy, config.posttraining, **compiled))


def rounded_weights(
    config: TrainConfig, model: GPTModel, layout: RankLayout
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what rounds the weights of a model to the format of precision.qat inside; without one, nothing."""
    if config.precision.qat == "none":
        return contextlib.nullcontext
    parts = None if layout.mesh is None else ModelParts(model)
    return RoundedWeights(model, quantizer_named(config.precision.qat), parts).in_force


def group_of_writers(ranks: Ranks, config: TrainConfig) -> dist.ProcessGroup | None:
    """Return a process group of all ranks for the threads that write checkpoints, made by all of them."""
    if ranks.world_size == 1:
        return None
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.distributed_timeout_minutes))
    return group


def with_loss_chunk(config: TrainConfig, start: TrainingState | None, vocab_size: int) -> TrainConfig:
    """Return the configuration with the loss chunk of the run, as its checkpoints record it: "auto" is what the
    checkpoint has, so that the continued run equals the uninterrupted one."""
    model = config.model
    if start is not None and model.loss_chunk_tokens == "auto":  # null, or absent: of before runs chose
        model = model.replace(loss_chunk_tokens=start.config["model"].get("loss_chunk_tokens"))
    chunk = model.loss_chunk(vocab_size, config.micro_batch_tokens)
    return config.replace(model=model.replace(loss_chunk_tokens=chunk))


def set_recomputation(model: GPTModel, options: ModelSource) -> None:
    """Have modules be recomputed in backward passes, as a run asks for it. Raises ConfigError for a name that means
    none."""
    try:
        names = matching_modules(model, options.recompute_modules, model.whole)
        recompute_modules(model, names, options.recompute_save_ops)
        save_results(model, options.recompute_save_ops)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def set_loss_options(model: GPTModel, options: ModelSource) -> None:
    """Set what trades time for memory, in every pipeline stage of a model, and the terms of the loss."""
    for part in (model, *(stage.model for stage in model.pipeline_stages)):
        part.activation_checkpointing = options.activation_checkpointing
        part.activation_func_fp8_input_store = options.activation_func_fp8_input_store
    set_recomputation(model, options)
    if model.post_process:
        assert options.loss_chunk_tokens != "auto", "with_loss_chunk has decided"
        model.output_layer.loss_chunk_tokens = options.loss_chunk_tokens
        model.output_layer.logits_z_loss_coeff = options.logits_z_loss_coeff
