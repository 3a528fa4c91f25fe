"""One optimizer step: micro-batches forward and backward, average, clip, update.

What is compiled is the function from token ids to the scalar loss (and, through autograd, its backward): the logits
stay inside, so the compiler fuses the loss into the output layer's neighbours and never returns a [B, S, V] tensor.
Everything outside it (gradient averaging, clipping, the fused AdamW) is a handful of large kernels that gain nothing
from compiling. Shapes are constant and the learning rate is tensor data, so one forward and one backward graph serve
the whole run.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.layers import Recipe, autocast, cache_weights, collect_statistics, microbatch

from ..compile.async_tensor_parallel import overlapping_backend_for, share_memory_of_ranks
from ..compile.cache import backend_for
from ..compile.compile_model import Mode, compile_model, with_room
from ..model import GPTModel
from ..model.recompute import offloading
from ..parallel.pipeline import Pipeline
from .config import PrecisionConfig, TrainConfig
from .data.batch_size import batch_size
from .data.windows import Batch
from .host import reads_are_free
from .objective import TERMS, Objective
from .optimizer.adamw import Optimizer
from .precision import RecipeSchedule
from .ranks.data_parallel import Ranks, mean_over_ranks
from .ranks.layout import RankLayout
from .ranks.reduction import Reduction

LossFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Of a Batch, or input ids [B, S] alone, and a weight: see `make_loss_function`."""


class TrainingError(RuntimeError):
    """Training cannot continue; the message says at which step and why."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, averaged over micro-batches and ranks.

    `loss` is the cross entropy; `aux_loss` what the routers add to it in the loss that is minimised, `mtp_loss` what
    the layers that predict further tokens add, `logits_z_loss` the z-loss of the logits. `skipped`: the gradient norm
    is not finite, or a spike, and nothing was updated. `metrics`: the numbers of the objective, by name; `loss` is its
    loss then.
    """

    loss: float
    aux_loss: float
    grad_norm: float
    skipped: bool = False
    mtp_loss: float = 0.0
    logits_z_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def compute_precision(
    precision: PrecisionConfig, recipe: Recipe | None, device: str, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Enter the number formats of the forward pass: torch's autocast for "bf16-mixed", ours for a recipe. group: the
    ranks that have the same layers, where not all have."""
    with contextlib.ExitStack() as stack:
        if precision.dtype == "bf16-mixed":
            stack.enter_context(torch.amp.autocast(device, dtype=torch.bfloat16))
        if recipe is not None:
            stack.enter_context(autocast(enabled=True, recipe=recipe, amax_reduction_group=group))
        yield


def make_loss_function(
    model: GPTModel,
    precision: PrecisionConfig,
    device: str,
    *,
    compiled: bool,
    mode: Mode = "whole",
    async_tensor_parallel: bool = False,
    objective: Objective | None = None,
    recipes: RecipeSchedule | None = None,
    offloaded: bool = False,
) -> LossFunction:
    """Return `f(batch, weight) -> (loss to minimise, what is added to the cross entropy in it)`, a float32 scalar and
    float32 [3]: the terms of the routers, of the layers that predict further tokens, and of the logits' z-loss; behind
    them the metrics of `objective` (None: the cross entropy, without metrics).

    batch: a Batch, or input ids [B, S]. weight: float32 scalar that everything but the term of the routers is
    multiplied by; None: 1.

    Compiled, it is one graph; with mode "block", one graph per kind of layer, one of the output layer, the rest eager.
    What would break a graph is an error. async_tensor_parallel: see `compile_model`. recipes: whose recipe in force
    the layers run under, with a graph for each; None: the first one of `precision`. offloaded: what the backward pass
    needs waits in main memory.
    """
    objective = objective or Objective()
    recipes = recipes or RecipeSchedule.first(precision, model.config.num_layers)

    def loss_function(
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return objective.loss(model, Batch(input_ids, labels, position_ids, documents), weight, **inputs)

    function = loss_function
    if compiled and mode == "block":
        compile_model(model, "block", dynamic=False, async_tensor_parallel=async_tensor_parallel)
    elif compiled:
        if async_tensor_parallel:
            share_memory_of_ranks(model)
        backend = overlapping_backend_for(model) if async_tensor_parallel else backend_for(model)
        # with room for all runs of a process
        function = with_room(torch.compile(loss_function, fullgraph=True, dynamic=False, backend=backend))

    def with_precision(
        batch: torch.Tensor | Batch, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments: tuple[Any, ...] = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
        offload = offloading() if offloaded else contextlib.nullcontext()
        with compute_precision(precision, recipes.now, device), offload:
            inputs = objective.inputs(Batch(*arguments))
            if weight is None and not inputs and all(argument is None for argument in arguments[1:]):
                return function(arguments[0])
            return function(*arguments, weight=weight, **inputs)

    return with_precision


def make_pipeline(
    model: GPTModel, config: TrainConfig, device: str, layout: RankLayout, recipes: RecipeSchedule | None = None
) -> Pipeline:
    """Return what runs micro-batches through the pipeline stages of a model, compiled layer by layer or not. recipes:
    see `make_loss_function`.

    Raises ConfigError where the schedule does not have this many micro-batches."""
    assert layout.stages is not None and layout.mesh is not None and layout.mesh.stages is not None
    found, group = recipes or RecipeSchedule.first(config.precision, model.config.num_layers), layout.mesh.same_layers
    if config.compile:
        overlapping = config.parallel.async_tensor_parallel
        compile_model(model, "block", dynamic=False, async_tensor_parallel=overlapping)
    return Pipeline(
        model,
        layout.stages,
        layout.mesh.stages,
        micro_batches=config.data.gradient_accumulation,
        fewer=batch_size(config.data, layout.data.world_size).micro_batches(),
        shape=(config.data.micro_batch_size, config.data.sequence_length),
        context=lambda: compute_precision(config.precision, found.now, device, group),
    )


def loss_weights(batches: Sequence[torch.Tensor | Batch], ranks: Ranks) -> list[torch.Tensor | None]:
    """Return what makes the mean over this rank's batches, and over ranks, of each batch's mean loss the mean over all
    predictions that are scored: n * (number of batches) / (predictions of all). None where every batch scores all."""
    if not any(isinstance(batch, Batch) and batch.labels is not None for batch in batches):
        return [None] * len(batches)
    counts = torch.stack([_scored(batch) for batch in batches])
    total = mean_over_ranks(counts.sum(), ranks)  # of a rank, on average
    return list((counts * len(batches) / total.clamp(min=1.0)).float().unbind())


def _scored(batch: torch.Tensor | Batch) -> torch.Tensor:
    """Return how many predictions the loss counts, a float64 scalar on the batch's device."""
    labels = batch.labels if isinstance(batch, Batch) else None
    if labels is not None:
        return (labels[:, 1:] != IGNORE_INDEX).sum().double()
    ids = batch.input_ids if isinstance(batch, Batch) else batch
    return torch.full((), ids[:, 1:].numel(), dtype=torch.float64, device=ids.device)


def _fields(
    batches: Sequence[torch.Tensor | Batch], weights: Sequence[torch.Tensor | None]
) -> list[dict[str, torch.Tensor]]:
    """Return what pipeline stages take of batches and of what their losses are multiplied by."""
    found = []
    for batch, weight in zip(batches, weights, strict=True):
        ids, labels, positions, documents = batch if isinstance(batch, Batch) else (batch, None, None, None)
        rows = None if weight is None else weight.to(ids.device).expand(ids.shape[0])
        fields = {"input_ids": ids, "labels": ids if labels is None else labels, "position_ids": positions}
        fields |= {"document_ids": documents, "weight": rows}
        found.append({name: value for name, value in fields.items() if value is not None})
    return found


def make_weight_cache(
    model: GPTModel, precision: PrecisionConfig, device: str, group: dist.ProcessGroup | None, recipes: RecipeSchedule
) -> Callable[[], None] | None:
    """Return a function to call before a step's micro-batches, to quantize every weight for all of them; None
    where `precision.cache_weights` is off. Then they run under `microbatch(first=False)`. group: see
    `compute_precision`; recipes: see `make_loss_function`."""
    if not precision.cache_weights:
        return None

    def quantize_weights() -> None:
        with compute_precision(precision, recipes.now, device, group):
            cache_weights(model)

    return quantize_weights


def train_step(
    loss_function: LossFunction | Pipeline,
    optimizer: Optimizer,
    micro_batches: Sequence[torch.Tensor | Batch],
    lr: float,
    *,
    step: int,
    ranks: Ranks,
    before: Callable[[], None] | None = None,
    statistics: bool = False,
    objective: Objective | None = None,
    rounded: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    reduction: Reduction | None = None,
) -> StepResult:
    """Do one step on this rank's micro-batches `[B, S]`, all of one shape, and return what happened. The loss is the
    mean over the predictions that are scored, in all micro-batches on all ranks.

    loss_function: of the model, or the pipeline that has its stages; objective: what it computes. before: see
    `make_weight_cache`. reduction: when gradients are averaged over the ranks; None: at the end. statistics: note
    what the recipe does to its operands, in the last micro-batch only, because each pass replaces what was noted.
    rounded: what the passes run in, and the update does not.
    The host reads nothing before the whole step is queued, and then six numbers (on CPU it reads as it goes). Raises
    TrainingError, leaving the parameters as they were, if the loss is not finite, or the gradient without
    `optimizer.skip_nonfinite`.
    """
    optimizer.zero_grad()
    reduction = reduction or Reduction(optimizer, ranks)
    total: torch.Tensor | int = 0  # the cross entropy, and the terms that are added to it
    if before is not None:
        with collect_statistics(statistics):
            before()
    objective = objective or Objective()
    weights = loss_weights(micro_batches, ranks) if objective.weighs_tokens else [None] * len(micro_batches)
    with rounded():
        if isinstance(loss_function, Pipeline):
            with microbatch(first=None if before is None else False), collect_statistics(statistics):
                total = loss_function.forward_backward(_fields(micro_batches, weights))
            optimizer.accumulate_gradients()
        else:
            for i, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True), 1):
                noting = statistics and i == len(micro_batches)
                with microbatch(first=None if before is None else False), collect_statistics(noting):
                    loss, terms = loss_function(batch) if weight is None else loss_function(batch, weight)
                with reduction.backward(last=i == len(micro_batches)):
                    (loss / len(micro_batches)).backward()
                optimizer.accumulate_gradients()
                total = total + torch.cat([(loss.detach() - terms[:TERMS].sum())[None], terms]) / len(micro_batches)
    reduction.finish()
    if isinstance(loss_function, Pipeline):
        loss_function.sum_embedding_gradients()
    assert isinstance(total, torch.Tensor), "there are micro-batches"
    norm = optimizer.clip_gradients()
    losses = mean_over_ranks(total, ranks).to(norm.device)  # with cpu_offload gradients are in main memory
    noop = optimizer.skips(norm)
    if not reads_are_free(norm.device):
        # what is read below stops the run, after the update was queued: it changes nothing
        bad = ~(torch.isfinite(losses[0]) & torch.isfinite(norm))
        noop = bad if noop is None else noop | bad
    else:
        check_finite(float(losses[0]), float(norm), step, skips=optimizer.config.skip_nonfinite)
    optimizer.step(lr, noop=noop)
    skipped = torch.zeros_like(norm) if noop is None else noop.float()
    found = torch.stack([*losses, norm, skipped]).tolist()  # the one read of a step
    mean_loss, mean_aux, mean_mtp, mean_z, *numbers, grad_norm, skip = found
    metrics = dict(zip(objective.metrics, numbers, strict=True))
    check_finite(mean_loss, grad_norm, step, skips=optimizer.config.skip_nonfinite)
    return StepResult(
        mean_loss, mean_aux, grad_norm, skipped=bool(skip), mtp_loss=mean_mtp, logits_z_loss=mean_z, metrics=metrics
    )


def check_finite(loss: float, grad_norm: float, step: int, *, skips: bool) -> None:
    """Raise TrainingError where a loss is not finite, or a gradient norm that no rule skips."""
    if not (math.isfinite(loss) and (skips or math.isfinite(grad_norm))):
        hint = "optimizer.skip_nonfinite goes on past it" if math.isfinite(loss) else "lower optimizer.lr?"
        raise TrainingError(f"step {step}: the loss is {loss} and the gradient norm {grad_norm}; {hint}")


@torch.no_grad()
def evaluate(
    loss_function: LossFunction | Pipeline,
    batches: Sequence[torch.Tensor | Batch],
    ranks: Ranks,
    objective: Objective | None = None,
    counted: int | None = None,
) -> float:
    """Return the mean cross entropy of the predictions that are scored, or of windows the loss of the objective, over
    the first `counted` batches of each rank; None: over all. The caller has called `model.eval()`.

    Batches are weighed outside of the model, in float64, so that the number is that of one rank with all of them."""
    weighs = (objective or Objective()).weighs_tokens
    counts = [_scored(b) if weighs else torch.ones((), dtype=torch.float64, device="cpu") for b in batches]
    for count in () if counted is None else counts[counted:]:
        count.zero_()
    labelled = weighs and any(isinstance(batch, Batch) and batch.labels is not None for batch in batches)
    weights = [torch.ones_like(count, dtype=torch.float32) if labelled else None for count in counts]
    if isinstance(loss_function, Pipeline):
        losses = loss_function.evaluate(_fields(batches, weights))
    else:
        found = []
        for batch, weight in zip(batches, weights, strict=True):
            loss, terms = loss_function(batch) if weight is None else loss_function(batch, weight)
            found.append(loss - terms[:TERMS].sum())
        losses = torch.stack(found)
    scored = torch.stack(counts).to(losses.device)
    sums = torch.stack([(losses.double() * scored).sum(), scored.sum()])
    total, count = mean_over_ranks(sums, ranks).tolist()
    return total / max(count, 1.0)
