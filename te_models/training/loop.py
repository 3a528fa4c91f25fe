"""The training loop. It reads from top to bottom: set up, resume, then step after step, then export.

Whatever the loop carries from one step to the next is in a checkpoint: weights, optimizer state, random states, and
two integers, the step and the position in the data. Everything else is a function of those and the configuration, so
that an interrupted run continues bit for bit.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_models.kernels.backend import using_backend

from ..eval_mode import in_eval_mode
from ..memory import return_freed_memory
from ..model import GPTModel
from ..model.moe.expert_bias import CollapseWatch, ExpertLoad, has_expert_bias, move_expert_bias, take_expert_load
from ..parallel.pipeline import Pipeline
from ..signals import Interrupted, StopSignals
from ..terminal import say
from .build import resolve_device
from .callbacks import Callback, Callbacks, Evaluation, Evaluations, PushToHub, RunView
from .checkpoints.files import checkpoint_dir
from .checkpoints.recipes import complete_recipe_state
from .config import TrainConfig
from .data.prefetch import Prefetcher
from .data.windows import Batch
from .log.curves import plot_loss
from .log.profiler import StepProfiler
from .metrics import METRICS
from .objective import Objective
from .optimizer.learning_rate import LearningRate
from .preflight import FINAL, FINAL_EMA
from .ranks.data_parallel import Ranks, barrier, largest_over_ranks, mean_over_ranks, ranks_from_environment
from .ranks.layout import RankLayout
from .row import MetricRows, busy_seconds
from .seeding import derive_seed, seed_all
from .setup import SetUp, set_up
from .step import LossFunction, TrainingError, evaluate, train_step

PLOT = "loss.png"


@dataclass(frozen=True)
class TrainResult:
    """Where a finished run left its files, and its last numbers (None if nothing was left to do or to measure)."""

    model_dir: Path
    metrics_file: Path
    step: int
    loss: float | None
    validation_loss: float | None


def train(
    config: TrainConfig,
    *,
    callbacks: Sequence[Callback] = (),
    evaluations: Mapping[str, Evaluation] | None = None,
) -> TrainResult:
    """Run, or continue, a training run.

    Under torchrun it is data parallel over the ranks. callbacks: are told of the run behind those that the
    configuration names. evaluations: functions of the model by name, measured where the validation loss is beside those
    of `evaluation.functions`. Raises ConfigError, DataError, TrainingCheckpointError for what the configuration asks
    and cannot be had, TrainingError if the loss stops being finite, CallbackError where others' code fails.
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
        if ranks.monitor is not None:
            ranks.monitor.stop_asked = lambda: signals.received
        opened.enter_context(_deterministic(config.deterministic))
        if config.backend != "auto":  # else what the process or its environment says
            opened.enter_context(using_backend(config.backend))
        hub = config.hub
        upload = [] if hub.repo_id is None else [PushToHub(hub.repo_id, private=hub.private, revision=hub.revision)]
        told = Callbacks.of(config.callbacks, [*callbacks, *upload], ranks)
        measured = Evaluations(config, evaluations or {}, ranks.world_size)
        return _run(config, device, ranks, signals, opened, told, measured)


def _run(
    config: TrainConfig,
    device: str,
    ranks: Ranks,
    signals: StopSignals,
    opened: contextlib.ExitStack,
    callbacks: Callbacks,
    evaluations: Evaluations,
) -> TrainResult:
    """Do the run. What is entered in `opened` is closed at the end, also when a step raises."""
    run = set_up(config, device, ranks, opened)
    config, step, position, layout = run.config, run.step, run.position, run.layout
    model, loss_function, saving, progress = run.model, run.loss_function, run.saving, run.progress
    has_experts = any(map(run.model_config.is_moe_layer, range(run.model_config.num_layers)))
    learning_rate = LearningRate.of(config)
    rows = MetricRows.of(run, device, ranks)
    moe = run.model_config.moe
    watch = None if moe is None else CollapseWatch(moe.moe_router_topk, moe.num_moe_experts)
    saved = rows.begun
    loss: float | None = None
    validation_loss: float | None = None
    if run.checkpoint and ranks.is_main:
        say(f"continuing from step {step} of {config.steps}: {run.checkpoint}")
    if config.compile and step < config.steps:
        progress.waiting("compiling the first step, which can take minutes")
    batches = opened.enter_context(_prefetcher(run))
    progress.begin(step)
    view = RunView(
        config=config, output_dir=run.output_dir, step=step, model=model, rank=ranks.rank, ranks=ranks.world_size
    )
    callbacks.tell("on_begin", view)
    callbacks.check("nothing was done")
    model.train()
    profiler = opened.enter_context(StepProfiler(config.profile, run.output_dir, device, ranks))
    deferred = opened.enter_context(contextlib.ExitStack())
    deferred.enter_context(signals.deferred())
    while step < config.steps:
        step_begun, busy = time.perf_counter(), busy_seconds()
        saving.check()
        profiler.begin(step + 1)
        seed_all(derive_seed(config.seed, "step", step, layout.gradients.rank, *run.stage))
        windows_of_step = run.batch.at(position)
        reading = time.perf_counter()
        micro_batches = [batch.to(device) for batch in batches.at(position)]
        data_s = time.perf_counter() - reading
        lr = learning_rate.at(step)
        noting, histograms = (
            every > 0 and _is_due(step + 1, every, config.steps)
            for every in (config.log.statistics_every, config.log.histogram_interval)
        )
        if run.recipes.enter(step):
            run.forget_weights()
            if ranks.is_main:
                say(f"step {step + 1}: from here on under the recipe {run.recipes.name}")
        noting |= histograms and run.recipes.now is not None
        result = train_step(
            loss_function,
            run.optimizer,
            micro_batches,
            lr,
            step=step + 1,
            ranks=run.step_ranks,
            before=run.quantize_weights,
            statistics=noting,
            objective=run.objective,
            rounded=run.rounded,
            reduction=run.reduction,
        )
        clip = {} if run.qk_clip is None else run.qk_clip.step(run.optimizer, skipped=result.skipped)
        if run.outer is not None:
            run.outer.after(step + 1)
            result = replace(result, loss=float(mean_over_ranks(torch.tensor(result.loss, device="cpu"), ranks)))
        load = None
        if has_experts:
            fixed = result.skipped or run.adapters is not None  # an adapter's folder has no biases of experts
            load = balance_experts(model, 0.0 if fixed else config.optimizer.moe_router_bias_update_rate, layout)
        step, position, loss = step + 1, position + windows_of_step, result.loss
        if watch is not None and load is not None and ranks.is_main and (collapse := watch.step(load)):
            say(f"note: {collapse}")
        profiler.end(step)
        if device == "cpu":
            return_freed_memory()
        seconds, busy = time.perf_counter() - step_begun, busy_seconds() - busy

        row = rows.row(
            step, result, lr, load, seconds, data_s, busy, (windows_of_step, position), histograms=histograms
        )
        row |= clip
        view = replace(view, step=step)
        callbacks.tell("on_step", view, result.loss)
        measures = bool(evaluations) or any(found.batches for found in run.validation.values())
        if measures and _is_due(step, config.evaluation.every, config.steps):
            row |= _measured(run, view, device, callbacks, evaluations)
            validation_loss = row.get("validation_loss", validation_loss)
        if noting:
            row["quantization"] = rows.quantization()
        for writer in run.writers:
            writer.write(row)
        progress.step(row)
        if ranks.is_main:
            callbacks.tell("on_log", view, dict(row))

        late = config.checkpoint.every_minutes and time.perf_counter() - saved > 60 * config.checkpoint.every_minutes
        if _saved(run, view, position, ranks, callbacks, signals.received, late=bool(late)):
            saved = time.perf_counter()
    saving.finish()
    deferred.close()  # the last checkpoint is written: a signal ends the run at once again
    _write_result(run, step, ranks)
    finished = TrainResult(run.output_dir / FINAL, run.output_dir / METRICS, step, loss, validation_loss)
    callbacks.tell("on_end", view, finished)
    callbacks.check(f"the run is complete: {finished.model_dir}")
    return finished


def _prefetcher(run: SetUp) -> Prefetcher:
    """Return what reads this rank's micro-batches of the next steps beside the running one."""
    B, mine = run.config.data.micro_batch_size, run.layout.data
    return Prefetcher(
        lambda at: [
            run.windows.examples(at + m * B, B) for m in range(mine.rank, run.batch.at(at) // B, mine.world_size)
        ],
        after=lambda at: at + run.batch.at(at),
        end=run.batch.position(run.config.steps),
        depth=run.config.data.prefetch,
    )


def _measured(run: SetUp, view: RunView, device: str, callbacks: Callbacks, evaluations: Evaluations) -> dict[str, Any]:
    """Measure the model as it would be exported, tell the callbacks, and return what the step's metrics get of it."""
    row: dict[str, Any] = {}
    with run.averaged(), run.rounded():
        losses = validation_losses(run, view.step, device)
        if evaluations:
            with in_eval_mode(run.model):
                row["evaluations"] = evaluations.run(view, callbacks)
    numbers = {f"validation_loss/{name}" if name else "validation_loss": x for name, x in losses.items()}
    if "" in losses:
        row["validation_loss"] = losses.pop("")
    if losses:
        row["validation_losses"] = losses
    callbacks.tell("on_evaluate", view, numbers | row.get("evaluations", {}))
    return row


def _saved(
    run: SetUp, view: RunView, position: int, ranks: Ranks, callbacks: Callbacks, signum: int, *, late: bool
) -> bool:
    """Save a checkpoint where one is due, and return whether it was. Every rank saves, and ends, at the same step,
    whichever of them has the signal, and whatever its clock says. Raises Interrupted, CallbackError."""
    config, step = run.config, view.step
    own = [signum, int(ranks.is_main and late), int(callbacks.failed is not None)]
    signum, any_late, failed = largest_over_ranks(torch.tensor(own, device="cpu"), ranks).tolist()
    where = checkpoint_dir(run.output_dir, step)
    due = any_late or signum or failed or _is_due(step, config.checkpoint.every, config.steps)
    saves, said = bool(due) and not where.exists(), f"step {step} of {config.steps} is saved in {where}"
    if saves:
        recipe = complete_recipe_state(run.model, run.recipes.used(step))
        values = {"step": step, "position": position, "data_digest": run.digest, "config": config.to_dict()}
        replicas = {} if run.outer is None else run.outer.state()
        with run.averaged():
            run.saving.save(values, recipe, keep_last=config.checkpoint.keep_last, replicas=replicas)
        if not failed:
            callbacks.tell("on_save", view, where)
            callbacks.check(said)
    if failed or signum:
        run.saving.finish()
        raise callbacks.error(said) if failed else Interrupted(signum, said)
    return saves


def _write_result(run: SetUp, step: int, ranks: Ranks) -> None:
    """Write an ordinary model folder, one of averages where the run has them, and a picture of the metrics."""
    with run.averaged():
        run.saving.export(run.output_dir / FINAL, step)
    if run.config.optimizer.ema_decay is not None:
        run.saving.export_averages(run.output_dir / FINAL_EMA, step)
    if ranks.is_main and run.config.log.plot:
        plot_loss({run.output_dir.name: run.output_dir / METRICS}, run.output_dir / PLOT)
    barrier(ranks)


def balance_experts(model: GPTModel, rate: float, layout: RankLayout) -> ExpertLoad:
    """Move the expert biases of a model, where it has any, in every pipeline stage; return the load of the experts of
    all layers, on every rank."""
    stages = None if layout.mesh is None else layout.mesh.stages
    if stages is None:
        load = take_expert_load(model)
        if has_expert_bias(model):
            move_expert_bias(model, load.tokens, rate)
        return load
    assert layout.mesh is not None and model.config.moe is not None
    total, further = model.config.num_layers, model.config.mtp_num_layers  # whose layers are of the last one's kind
    layers = [layer for layer in range(total + further) if model.config.is_moe_layer(min(layer, total - 1))]
    names = [int(name) for name in model.decoder.layers._modules]
    names += [] if model.mtp is None else range(total, total + further)
    own = [layers.index(name) for name in names if name in layers]
    device = next(model.parameters()).device
    counts = torch.zeros(len(layers), model.config.moe.num_moe_experts + 1, dtype=torch.int64, device=device)
    if own:
        load = take_expert_load(model, process_group=layout.mesh.same_layers)
        if has_expert_bias(model):
            move_expert_bias(model, load.tokens, rate)
        counts[own] = torch.cat([load.tokens, load.dropped[:, None]], 1)
    dist.all_reduce(counts, group=stages)  # each layer of one stage: the others have zeros
    return ExpertLoad(counts[:, :-1], counts[:, -1])


def validation_losses(run: SetUp, step: int, device: str) -> dict[str, float]:
    """Return the loss of each validation set, "" being what is held out of the training data.

    Raises TrainingError for one that is not finite."""
    losses = {
        name: evaluate_model(
            run.model, run.loss_function, found.batches, device, run.layout.gradients, run.objective, found.counted
        )
        for name, found in run.validation.items()
        if found.batches
    }
    for name, value in losses.items():
        if not math.isfinite(value):
            what = f"validation loss of {name}" if name else "validation loss"
            raise TrainingError(f"step {step}: the {what} is {value}; lower optimizer.lr?")
    return losses


def evaluate_model(
    model: torch.nn.Module,
    loss_function: LossFunction | Pipeline,
    batches: list[Batch],
    device: str,
    ranks: Ranks,
    objective: Objective | None = None,
    counted: int | None = None,
) -> float:
    """Return the validation loss, with the model in eval mode for as long as that takes; arguments of `evaluate`."""
    with in_eval_mode(model):
        return evaluate(loss_function, [batch.to(device) for batch in batches], ranks, objective, counted)


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
