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

from te_models.layers import quantization_statistics, set_rounding_seed

from ..config import ConfigError
from ..memory import return_freed_memory
from ..model.expert_bias import has_expert_bias, max_load, update_expert_bias
from ..model.flops import training_flops_per_token
from ..signals import Interrupted, StopSignals
from ..terminal import say
from .build import build_model, build_optimizer, open_data, resolve_device
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
from .config import TrainConfig
from .data.dataset import Windows
from .metrics import METRICS, MetricsFile, finite, plot_loss, read_metrics
from .optimizer.learning_rate import LearningRate, continued_config
from .precision import cpu_gemm_of_run
from .preflight import FINAL, check_run
from .progress import Progress
from .ranks.data_parallel import Ranks, barrier, largest_over_ranks, ranks_from_environment
from .ranks.layout import layout_of
from .seeding import derive_seed, rounding_seed, seed_all
from .step import LossFunction, TrainingError, evaluate, make_loss_function, make_weight_cache, train_step

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
        if not Path(config.data.path).exists():
            progress.waiting(f"tokenizing data.text into {config.data.path}")
        dataset = open_data(config.data, vocab_size=model_config.vocab_size, may_build=True)
    barrier(ranks)
    if not ranks.is_main:
        dataset = open_data(config.data, vocab_size=model_config.vocab_size, may_build=False)
    digest = check_same_data(dataset, start, ranks)
    S, B, fraction = config.data.sequence_length, config.data.micro_batch_size, config.data.validation_fraction
    windows = Windows(dataset, S, "train", fraction, config.seed)
    validation = []
    if fraction:
        validation = validation_batches(config, Windows(dataset, S, "validation", fraction, config.seed), data_ranks)

    # Model and optimizer.
    source = checkpoint or config.model.path
    progress.waiting(f"loading {source}" if source else "making a model of random weights")
    with naming_the_intact(checkpoint, output_dir):
        model = build_model(config, device, checkpoint, start, layout)
    model.activation_checkpointing = config.model.activation_checkpointing
    model.output_layer.loss_chunk_tokens = config.model.loss_chunk_tokens
    optimizer = build_optimizer(config, model, layout)
    saving = Saving(output_dir, model, optimizer, layout, ranks, config.model.path, checkpoint)
    if start:
        with naming_the_intact(checkpoint, output_dir):
            saving.restore(start)
    loss_function = make_loss_function(
        model,
        config.precision,
        device,
        compiled=config.compile,
        mode=config.compile_mode,
    )
    quantize_weights = make_weight_cache(model, config.precision, device)
    set_rounding_seed(model, rounding_seed(config.seed, ranks.rank))
    seed_all(derive_seed(config.seed, "run", data_ranks.rank))
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
    balanced = has_expert_bias(model)
    begun = saved = time.perf_counter()
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate = LearningRate.of(config)
    if checkpoint and ranks.is_main:
        say(f"continuing from step {step} of {config.steps}: {checkpoint}")
    if config.compile and step < config.steps:
        progress.waiting("compiling the first step, which can take minutes")
    progress.begin(step)
    model.train()
    deferred = opened.enter_context(contextlib.ExitStack())
    deferred.enter_context(signals.deferred())
    while step < config.steps:
        step_begun = time.perf_counter()
        seed_all(derive_seed(config.seed, "step", step, data_ranks.rank))
        first = range(data_ranks.rank, micro_batches_per_step, data_ranks.world_size)
        micro_batches = [windows.batch(position + m * B, B).to(device) for m in first]
        lr = learning_rate.at(step)
        noting = config.log.statistics_every > 0 and _is_due(step + 1, config.log.statistics_every, config.steps)
        result = train_step(
            loss_function,
            optimizer,
            micro_batches,
            lr,
            step=step + 1,
            ranks=data_ranks,
            before=quantize_weights,
            statistics=noting,
        )
        load = None
        if balanced:
            load = update_expert_bias(model, 0.0 if result.skipped else config.optimizer.moe_router_bias_update_rate)
        step, position, loss = step + 1, position + micro_batches_per_step * B, result.loss
        if device == "cpu":
            return_freed_memory()
        seconds = time.perf_counter() - step_begun

        row: dict[str, Any] = {"step": step, "loss": result.loss, "aux_loss": result.aux_loss, "lr": lr}
        row |= {"grad_norm": None if result.skipped else result.grad_norm, "tokens": step * tokens_per_step}
        row |= {"skipped": True} if result.skipped else {}
        row |= {} if load is None else {"max_expert_load": float(max_load(load))}
        row |= {"tokens_per_second": tokens_per_step / seconds, "seconds": time.perf_counter() - begun}
        row["tflops"] = tflop_of_rank / seconds
        if config.log.peak_tflops is not None:
            row["mfu"] = row["tflops"] / config.log.peak_tflops
        if validation and _is_due(step, config.evaluation.every, config.steps):
            validation_loss = evaluate_model(model, loss_function, validation, device, data_ranks)
            if not math.isfinite(validation_loss):
                raise TrainingError(f"step {step}: the validation loss is {validation_loss}; lower optimizer.lr?")
            row["validation_loss"] = validation_loss
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
            barrier(ranks)
            saved = time.perf_counter()
        if signum:
            raise Interrupted(signum, f"step {step} of {config.steps} is saved in {checkpoint_dir(output_dir, step)}")
    deferred.close()  # the last checkpoint is written: a signal ends the run at once again

    # The result: an ordinary model folder, the metrics, and a picture of them.
    saving.export(output_dir / FINAL, step)
    if ranks.is_main and config.log.plot:
        plot_loss({output_dir.name: output_dir / METRICS}, output_dir / PLOT)
    barrier(ranks)
    return TrainResult(output_dir / FINAL, output_dir / METRICS, step, loss, validation_loss)


def validation_batches(config: TrainConfig, windows: Windows, ranks: Ranks) -> list[torch.Tensor]:
    """Return this rank's validation batches: full ones only, the same number on every rank."""
    B = config.data.micro_batch_size
    count = min(config.evaluation.batches, len(windows) // (B * ranks.world_size))
    if count == 0 and config.evaluation.every:
        raise ConfigError(
            f"the validation split has {len(windows)} windows: less than one batch of {B} for each of the "
            f"{ranks.world_size} ranks"
        )
    return [windows.batch((i * ranks.world_size + ranks.rank) * B, B) for i in range(count)]


def evaluate_model(
    model: torch.nn.Module, loss_function: LossFunction, batches: list[torch.Tensor], device: str, ranks: Ranks
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
