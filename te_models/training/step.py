"""One optimizer step: micro-batches forward and backward, average, clip, update.

What is compiled is the function from token ids to the scalar loss (and, through autograd, its backward): the logits
stay inside, so the compiler fuses the loss into the output layer's neighbours and never returns a [B, S, V] tensor.
Everything outside it (gradient averaging, clipping, the fused AdamW) is a handful of large kernels that gain nothing
from compiling. Shapes are constant and the learning rate is tensor data, so one forward and one backward graph serve
the whole run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from te_models.layers import Recipe, autocast, cache_weights, collect_statistics, gradient_of, microbatch
from te_models.layers.tensor.fsdp import local_part

from ..compile.compile_model import Mode, compile_model, with_room
from ..model import GPTModel
from .config import PrecisionConfig
from .optimizer.adamw import Optimizer
from .precision import build_recipe
from .ranks.data_parallel import Ranks, average_gradients, mean_over_ranks

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TrainingError(RuntimeError):
    """Training cannot continue; the message says at which step and why."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, averaged over micro-batches and ranks.

    `loss` is the cross entropy; `aux_loss` what the routers add to it in the loss that is minimised. `skipped`: the
    gradient norm is not finite and nothing was updated.
    """

    loss: float
    aux_loss: float
    grad_norm: float
    skipped: bool = False


@contextlib.contextmanager
def compute_precision(precision: PrecisionConfig, recipe: Recipe | None, device: str) -> Iterator[None]:
    """Enter the number formats of the forward pass: torch's autocast for "bf16-mixed", ours for a recipe."""
    with contextlib.ExitStack() as stack:
        if precision.dtype == "bf16-mixed":
            stack.enter_context(torch.amp.autocast(device, dtype=torch.bfloat16))
        if recipe is not None:
            stack.enter_context(autocast(enabled=True, recipe=recipe))
        yield


def make_loss_function(
    model: GPTModel,
    precision: PrecisionConfig,
    device: str,
    *,
    compiled: bool,
    mode: Mode = "whole",
) -> LossFunction:
    """Return `f(input_ids [B, S]) -> (loss to minimise, auxiliary part of it)`, both float32 scalars.

    Compiled, it is one graph; with mode "block", one graph per kind of layer, one of the output layer, the rest eager.
    What would break a graph is an error.
    """
    recipe = build_recipe(precision, model.config.num_layers)

    def loss_function(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(input_ids, labels=input_ids, return_logits=False)
        aux_loss = torch.zeros_like(output.loss) if output.aux_loss is None else output.aux_loss
        return output.loss, aux_loss.detach()

    function = loss_function
    if compiled and mode == "block":
        compile_model(model, "block", dynamic=False)
    elif compiled:
        function = with_room(torch.compile(loss_function, fullgraph=True, dynamic=False))  # of all runs of a process

    def with_precision(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with compute_precision(precision, recipe, device):
            return function(input_ids)

    return with_precision


def make_weight_cache(model: GPTModel, precision: PrecisionConfig, device: str) -> Callable[[], None] | None:
    """Return a function to call before a step's micro-batches, which quantizes every weight for all of them; None
    where `precision.cache_weights` is off. Then they run under `microbatch(first=False)`."""
    if not precision.cache_weights:
        return None
    recipe = build_recipe(precision, model.config.num_layers)

    def quantize_weights() -> None:
        with compute_precision(precision, recipe, device):
            cache_weights(model)

    return quantize_weights


def train_step(
    loss_function: LossFunction,
    optimizer: Optimizer,
    micro_batches: Sequence[torch.Tensor],
    lr: float,
    *,
    step: int,
    ranks: Ranks,
    before: Callable[[], None] | None = None,
    statistics: bool = False,
) -> StepResult:
    """Do one step on this rank's micro-batches `[B, S]`, all of one shape, and return what happened.

    before: see `make_weight_cache`. statistics: note what the recipe does to its operands, in the last micro-batch
    only, because each pass replaces what was noted. Raises TrainingError, leaving the parameters as they were, if the
    loss is not finite, or the gradient without `optimizer.skip_nonfinite`.
    """
    optimizer.zero_grad()
    total = torch.zeros(2)
    if before is not None:
        with collect_statistics(statistics):
            before()
    for i, input_ids in enumerate(micro_batches, 1):
        noting = statistics and i == len(micro_batches)
        with microbatch(first=None if before is None else False), collect_statistics(noting):
            loss, aux_loss = loss_function(input_ids)
        (loss / len(micro_batches)).backward()
        optimizer.accumulate_gradients()
        total += torch.stack([loss.detach() - aux_loss, aux_loss]).cpu() / len(micro_batches)
    reduce_gradients(optimizer, ranks)
    norm = optimizer.clip_gradients()
    grad_norm, skip = float(norm), optimizer.config.skip_nonfinite
    mean_loss, mean_aux = mean_over_ranks(total, ranks).tolist()
    if not (math.isfinite(mean_loss) and (skip or math.isfinite(grad_norm))):
        hint = "optimizer.skip_nonfinite goes on past it" if math.isfinite(mean_loss) else "lower optimizer.lr?"
        raise TrainingError(f"step {step}: the loss is {mean_loss} and the gradient norm {grad_norm}; {hint}")
    optimizer.step(lr, noop=~torch.isfinite(norm) if skip else None)
    return StepResult(mean_loss, mean_aux, grad_norm, skipped=not math.isfinite(grad_norm))


@torch.no_grad()
def reduce_gradients(optimizer: Optimizer, ranks: Ranks) -> None:
    """Replace this rank's gradients by the gradient of the mean loss over `ranks`, those with data of their own. FSDP2
    has averaged the gradients of what it shards; of experts over the ranks that have the same ones alone."""
    experts = optimizer.experts
    whole = [p for p in optimizer.parameters.values() if local_part(p) is p]
    distributed, copies = ((), None) if experts is None or experts.sharded else (experts.parameters, experts.copies)
    average_gradients(whole, ranks, distributed=distributed, copies=copies)
    if experts is not None and experts.sharded:
        for parameter in experts.parameters:
            gradient = gradient_of(parameter)
            if gradient is not None:
                local_part(gradient).div_(experts.group.size())


@torch.no_grad()
def evaluate(loss_function: LossFunction, batches: Sequence[torch.Tensor], ranks: Ranks) -> float:
    """Return the mean cross entropy over this rank's batches and all ranks. The caller has called `model.eval()`."""
    losses = [loss - aux_loss for loss, aux_loss in map(loss_function, batches)]
    return float(mean_over_ranks(torch.stack(losses).mean().cpu(), ranks))
