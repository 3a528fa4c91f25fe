"""The training loop. It reads from top to bottom: set up, resume, then step after step, then export.

Whatever the loop carries from one step to the next is in a checkpoint: weights, optimizer state, random states, and
two integers, the step and the position in the data. Everything else is a function of those and the configuration,
which is why an interrupted run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_models.layers import quantization_statistics, set_rounding_seed

from ..memory import return_freed_memory
from ..model import GPTModel
from ..model.expert_bias import ExpertLoad, has_expert_bias, move_expert_bias, take_expert_load
from ..model.flops import training_flops_per_token
from ..parallel.pipeline import Pipeline
from ..signals import Interrupted, StopSignals
from ..terminal import say
from .build import build_model, build_optimizer, resolve_device
from .checkpoints.background import BackgroundWriter
from .checkpoints.files import checkpoint_dir
from .checkpoints.saving import Saving
from .checkpoints.start import (
    check_same_data,
    check_same_run,
    complete_recipe_state,
    naming_the_intact,
    open_start,
    restore_generators,
    set_newer_aside,
)
from .config import ModelSource, TrainConfig
from .data.prefetch import Prefetcher
from .data.windows import Batch
from .lora import Adapters
from .metrics import METRICS, MetricsFile, finite, plot_loss, read_metrics
from .optimizer.learning_rate import LearningRate, continued_config
from .precision import cpu_gemm_of_run
from .preflight import FINAL, FINAL_EMA, check_run
from .progress import Progress
from .ranks.agreement import check_same_settings
from .ranks.data_parallel import Ranks, barrier, largest_over_ranks, ranks_from_environment
from .ranks.layout import Layout, layout_of
from .ranks.spread import spread_over_ranks
from .run_data import open_data, training_windows, validation_batches, validation_windows
from .seeding import derive_seed, rounding_seed, seed_all
from .step import (
    LossFunction,
    TrainingError,
    evaluate,
    make_loss_function,
    make_pipeline,
    make_weight_cache,
    train_step,
)

PLOT = "loss.png"


@dataclass(frozen=True)
class TrainResult:
    """Where a finished run left its files, and its last numbers (None if nothing was left to do or to measure)."""

    model_dir: Path
    metrics_file: Path
    step: int
    loss: float | None
    validation_loss: float | None


def train(config: TrainConfig) -> TrainResult:
    """Run, or continue, a training run.

    Under torchrun it is data parallel over the ranks. Raises ConfigError, DataError, TrainingCheckpointError for what
    the configuration asks and cannot be had, TrainingError if the loss stops being finite.
    """
    device = resolve_device(config.device)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    with contextlib.ExitStack() as opened:
        signals = opened.enter_context(StopSignals())
        ranks = ranks_from_environment(device, timeout)
        opened.callback(ranks.leave)
        if device == "cuda" and ranks.local_rank is not None:
            torch.cuda.set_device(ranks.local_rank)
        ranks = opened.enter_context(ranks.monitored(timeout))
        opened.enter_context(_deterministic(config.deterministic))
        return _run(config, device, ranks, signals, opened)


def _run(
    config: TrainConfig, device: str, ranks: Ranks, signals: StopSignals, opened: contextlib.ExitStack
) -> TrainResult:
    """Do the run. What is entered in `opened` is closed at the end, also when a step raises."""
    # Where to start: from a checkpoint, or from nothing.
    output_dir = Path(config.output_dir)
    progress = opened.enter_context(Progress(config.steps, shown=ranks.is_main and config.log.progress))
    if config.resume_from or (output_dir / "checkpoints").exists():
        progress.waiting("checking the checkpoint to continue from")
    check_same_settings(config, ranks)
    layout = layout_of(config.parallel, ranks, device)
    data_ranks = layout.data
    checkpoint, start = open_start(config, output_dir, ranks)
    if start:
        check_same_run(config, start, data_ranks)
        config = continued_config(config, start.config, start.step)
    config = opened.enter_context(cpu_gemm_of_run(config, start, ranks, device))
    step, position = (start.step, start.position) if start else (0, 0)
    model_config, notes = check_run(config, start, checkpoint, device, layout.dims, reads_text=ranks.is_main)
    if ranks.is_main:
        read_metrics(output_dir / METRICS)  # a damaged one is refused now, and not when the loss is drawn
    for note in notes if ranks.is_main else ():
        say(f"note: {note}")

    # Data.
    if ranks.is_main:
        if config.data.path is not None and not Path(config.data.path).exists():
            progress.waiting(f"tokenizing data.text into {config.data.path}")
        data = open_data(config, vocab_size=model_config.vocab_size, may_build=True)
    barrier(ranks)
    if not ranks.is_main:
        data = open_data(config, vocab_size=model_config.vocab_size, may_build=False)
    digest = check_same_data(data, start, ranks)
    S, B = config.data.sequence_length, config.data.micro_batch_size
    windows = training_windows(config, data)
    validation = {
        name: validation_batches(config, parts, data_ranks, name)
        for name, parts in validation_windows(config, data).items()
    }

    # Model and optimizer.
    source = checkpoint or config.model.path
    progress.waiting(f"loading {source}" if source else "making a model of random weights")
    with naming_the_intact(checkpoint, output_dir):
        model = build_model(config, device, checkpoint, start, layout)
    set_memory_options(model, config.model)
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
    loss_function: LossFunction | Pipeline
    if layout.stages is not None:
        loss_function = make_pipeline(model, config, device, layout)
    else:
        compiled = config.compile
        loss_function = make_loss_function(model, config.precision, device, compiled=compiled, mode=config.compile_mode)
    quantize_weights = make_weight_cache(model, config.precision, device)
    set_rounding_seed(model, rounding_seed(config.seed, ranks.rank))
    stages = None if layout.mesh is None else layout.mesh.stages
    stage = () if stages is None else ("stage", stages.rank())  # whose dropout is its own
    seed_all(derive_seed(config.seed, "run", layout.gradients.rank, *stage))
    if start:
        complete_recipe_state(model, config.precision)
        with naming_the_intact(checkpoint, output_dir):
            restore_generators(start, ranks, model, layout.dims)
    start = None  # its tensors map a file, which would take its place on the disk as long as the run goes on

    # Files and progress: rank 0 only.
    output_dir.mkdir(parents=True, exist_ok=True)
    metrics = None
    if ranks.is_main:
        if checkpoint is not None and config.resume_from is not None:
            set_newer_aside(checkpoint, step, output_dir)
        metrics = opened.enter_context(MetricsFile(output_dir / METRICS, keep_steps=step))

    micro_batches_per_step = config.data.gradient_accumulation * data_ranks.world_size
    tokens_per_step = micro_batches_per_step * B * S
    tflop_of_rank = training_flops_per_token(model_config, S) * tokens_per_step / ranks.world_size / 1e12
    has_experts = any(map(model_config.is_moe_layer, range(model_config.num_layers)))
    begun = saved = time.perf_counter()
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate = LearningRate.of(config)
    if checkpoint and ranks.is_main:
        say(f"continuing from step {step} of {config.steps}: {checkpoint}")
    if config.compile and step < config.steps:
        progress.waiting("compiling the first step, which can take minutes")
    first = range(data_ranks.rank, micro_batches_per_step, data_ranks.world_size)
    stride = micro_batches_per_step * B
    batches = Prefetcher(
        lambda at: [windows.examples(at + m * B, B) for m in first],
        stride=stride,
        end=position + (config.steps - step) * stride,
        depth=config.data.prefetch,
    )
    opened.enter_context(batches)
    progress.begin(step)
    model.train()
    deferred = opened.enter_context(contextlib.ExitStack())
    deferred.enter_context(signals.deferred())
    while step < config.steps:
        step_begun = time.perf_counter()
        saving.check()
        seed_all(derive_seed(config.seed, "step", step, layout.gradients.rank, *stage))
        reading = time.perf_counter()
        micro_batches = [batch.to(device) for batch in batches.at(position)]
        data_s = time.perf_counter() - reading
        lr = learning_rate.at(step)
        noting = config.log.statistics_every > 0 and _is_due(step + 1, config.log.statistics_every, config.steps)
        result = train_step(
            loss_function,
            optimizer,
            micro_batches,
            lr,
            step=step + 1,
            ranks=layout.gradients,
            before=quantize_weights,
            statistics=noting,
        )
        load = None
        if has_experts:
            fixed = result.skipped or adapters is not None  # an adapter's folder has no biases: the base's must stay
            load = balance_experts(model, 0.0 if fixed else config.optimizer.moe_router_bias_update_rate, layout)
        step, position, loss = step + 1, position + micro_batches_per_step * B, result.loss
        if device == "cpu":
            return_freed_memory()
        seconds = time.perf_counter() - step_begun

        row: dict[str, Any] = {"step": step, "loss": result.loss, "aux_loss": result.aux_loss, "lr": lr}
        row |= {
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "tokens": step * tokens_per_step,
        }
        row |= {"skipped": True} if result.skipped else {}
        if load is not None:
            pp = layout.dims.pipeline_model_parallel_size
            experts = load.metrics(repeated=ranks.world_size // (pp * layout.gradients.world_size))
            row |= {"max_expert_load": max(experts["max_load"]), "experts": experts}
        row |= {"tokens_per_second": tokens_per_step / seconds, "seconds": time.perf_counter() - begun}
        row |= spread_over_ranks(seconds, data_s, device, ranks)
        row["tflops"] = tflop_of_rank / seconds
        if config.log.peak_tflops is not None:
            row["mfu"] = row["tflops"] / config.log.peak_tflops
        if any(validation.values()) and _is_due(step, config.evaluation.every, config.steps):
            losses = {
                name: evaluate_model(model, loss_function, held_out, device, layout.gradients)
                for name, held_out in validation.items()
                if held_out
            }
            for name, value in losses.items():
                if not math.isfinite(value):
                    what = f"validation loss of {name}" if name else "validation loss"
                    raise TrainingError(f"step {step}: the {what} is {value}; lower optimizer.lr?")
            if "" in losses:
                row["validation_loss"] = validation_loss = losses.pop("")
            if losses:
                row["validation_losses"] = losses
        if noting:
            row["quantization"] = finite(quantization_statistics(model))
        if metrics:
            metrics.write(row)
        progress.step(row)

        late = config.checkpoint.every_minutes and time.perf_counter() - saved > 60 * config.checkpoint.every_minutes
        # every rank saves, and ends, at the same step, whichever of them has the signal, and whatever its clock says
        agreed = largest_over_ranks(torch.tensor([signals.received, int(ranks.is_main and late)]), ranks)
        signum, late = agreed.tolist()
        due = late or signum or _is_due(step, config.checkpoint.every, config.steps)
        if due and not checkpoint_dir(output_dir, step).exists():
            recipe = complete_recipe_state(model, config.precision)
            values = {"step": step, "position": position, "data_digest": digest, "config": config.to_dict()}
            saving.save(values, recipe, keep_last=config.checkpoint.keep_last)
            saved = time.perf_counter()
        if signum:
            saving.finish()
            raise Interrupted(signum, f"step {step} of {config.steps} is saved in {checkpoint_dir(output_dir, step)}")
    saving.finish()
    deferred.close()  # the last checkpoint is written: a signal ends the run at once again

    # The result: an ordinary model folder, the metrics, and a picture of them.
    saving.export(output_dir / FINAL, step)
    if config.optimizer.ema_decay is not None and ranks.is_main:
        saving.export_averages(output_dir / FINAL_EMA)
    if ranks.is_main and config.log.plot:
        plot_loss({output_dir.name: output_dir / METRICS}, output_dir / PLOT)
    barrier(ranks)
    return TrainResult(output_dir / FINAL, output_dir / METRICS, step, loss, validation_loss)


def group_of_writers(ranks: Ranks, config: TrainConfig) -> dist.ProcessGroup | None:
    """Return a process group of all ranks for the threads that write checkpoints, made by all of them."""
    if ranks.world_size == 1:
        return None
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.distributed_timeout_minutes))
    return group


def set_memory_options(model: GPTModel, options: ModelSource) -> None:
    """Set what trades time for memory, in every pipeline stage of a model."""
    for part in (model, *(stage.model for stage in model.pipeline_stages)):
        part.activation_checkpointing = options.activation_checkpointing
    if model.post_process:
        model.output_layer.loss_chunk_tokens = options.loss_chunk_tokens


def balance_experts(model: GPTModel, rate: float, layout: Layout) -> ExpertLoad:
    """Move the expert biases of a model, where it has any, in every pipeline stage; return the load of the experts of
    all layers, on every rank."""
    stages = None if layout.mesh is None else layout.mesh.stages
    if stages is None:
        load = take_expert_load(model)
        if has_expert_bias(model):
            move_expert_bias(model, load.tokens, rate)
        return load
    assert layout.mesh is not None and model.config.moe is not None
    layers = [layer for layer in range(model.config.num_layers) if model.config.is_moe_layer(layer)]
    own = [layers.index(int(name)) for name in model.decoder.layers._modules if int(name) in layers]
    device = next(model.parameters()).device
    counts = torch.zeros(len(layers), model.config.moe.num_moe_experts + 1, dtype=torch.int64, device=device)
    if own:
        load = take_expert_load(model, process_group=layout.mesh.same_layers)
        if has_expert_bias(model):
            move_expert_bias(model, load.tokens, rate)
        counts[own] = torch.cat([load.tokens, load.dropped[:, None]], 1)
    dist.all_reduce(counts, group=stages)  # each layer of one stage: the others have zeros
    return ExpertLoad(counts[:, :-1], counts[:, -1])


def evaluate_model(
    model: torch.nn.Module,
    loss_function: LossFunction | Pipeline,
    batches: list[Batch],
    device: str,
    ranks: Ranks,
) -> float:
    """Return the validation loss, with the model in eval mode for as long as that takes."""
    model.eval()
    loss = evaluate(loss_function, [batch.to(device) for batch in batches], ranks)
    model.train()
    return loss


def _is_due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Ask torch for reproducible kernels, without its filling of every empty tensor, and restore the setting after."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if enabled:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
