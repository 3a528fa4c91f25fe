"""What a micro-batch costs in a pipeline stage, and the schedule of a step run with those costs in place of the layers.

A stage runs two micro-batches on tensors without values; the first one also creates the gradients of its parameters.
The schedule is torch's own, over stages that compute nothing: each pass adds the bytes and the collectives that were
measured. What is in flight, and what is sent from stage to stage, is therefore what the schedule makes it.

B batch, S sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_models.layers.module.base import GemmModule

from ..model.stage import shape_of_part
from ..parallel.pipeline import Pipeline, Stage
from .micro_batch import layer_kind
from .result import Moved, added_traffic
from .simulation import Recorder


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through a stage. held: bytes that live after it and did not before, less those that
    it hands on. peak: bytes at its highest point beyond those before. traffic: its collectives."""

    held: float = 0.0
    peak: float = 0.0
    traffic: Moved = field(default_factory=dict)

    def plus(self, other: Pass, factor: float) -> Pass:
        """Return this and `factor` times another."""
        traffic = added_traffic(self.traffic, other.traffic, factor)
        return Pass(self.held + factor * other.held, self.peak + factor * other.peak, traffic)


@dataclass(frozen=True)
class MicroBatchCost:
    """The passes of a micro-batch. weights: the gradients that a schedule computes later; empty where it does not."""

    forward: Pass
    backward: Pass
    weights: Pass

    def plus(self, other: MicroBatchCost, factor: float) -> MicroBatchCost:
        """Return this and `factor` times another."""
        return MicroBatchCost(
            self.forward.plus(other.forward, factor),
            self.backward.plus(other.backward, factor),
            self.weights.plus(other.weights, factor),
        )


@dataclass(frozen=True)
class StageCost:
    """first: the micro-batch that finds no gradients of parameters. further: each of the others."""

    first: MicroBatchCost
    further: MicroBatchCost

    def plus(self, other: StageCost, factor: float) -> StageCost:
        """Return this and `factor` times another."""
        return StageCost(self.first.plus(other.first, factor), self.further.plus(other.further, factor))


Known = dict[Any, tuple[StageCost, tuple[bool, ...]]]
"""What stages cost, and which of their parameters get gradients, by all that it depends on: the run but for its
schedule, and the kind of the stage."""


def measure(
    stages: Sequence[Stage], shape: tuple[int, int], recorder: Recorder, run: Any = None, known: Known | None = None
) -> list[StageCost]:
    """Run two micro-batches of `shape` (B, S) through stages of a `Pipeline` and back, and return their costs.

    Called inside `recorder`. Of stages whose layers are alike one runs, or none where it is `known` what a stage of
    this kind costs in this `run`. All are left with the gradients of their parameters.
    """
    known, costs = {} if known is None else known, []
    for stage in stages:
        kind = run, stage_kind(stage)
        if kind in known:
            for parameter, trained in zip(stage.parameters(), known[kind][1], strict=True):
                parameter.grad = torch.empty_like(parameter) if trained else None
        else:
            cost = StageCost(*(_micro_batch(stage, shape, recorder) for _ in range(2)))
            known[kind] = cost, tuple(parameter.grad is not None for parameter in stage.parameters())
        costs.append(known[kind][0])
    return costs


def stage_kind(stage: Stage) -> Any:
    """Return what stages have in common that cost the same: their layers' kinds, and their parameters, but for their
    names' numbers, in order."""
    model, parameters = stage.model, stage.named_parameters()
    layers = tuple(layer_kind(model.config, int(number)) for number in model.decoder.layers._modules)
    return layers, tuple((re.sub(r"\d+", "", name), p.shape, p.dtype, p.requires_grad) for name, p in parameters)


def _micro_batch(stage: Stage, shape: tuple[int, int], recorder: Recorder) -> MicroBatchCost:
    inputs, start = _inputs(stage, shape), recorder.live
    with recorder.apart() as forward:
        ids = torch.zeros(shape, dtype=torch.int64, device="cpu")
        outputs = stage(*inputs, labels=ids, **({"input_ids": ids} if stage.model.config.mtp_num_layers else {}))
        del ids
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    held = recorder.live - start - _bytes(outputs)
    trained = [output for output in outputs if output.requires_grad]  # router losses only behind a router
    gradients = [torch.ones_like(output) for output in trained]
    with recorder.apart() as backward:
        torch.autograd.backward(trained, gradients)
    del outputs, trained, gradients
    own = recorder.live - start - sum(_bytes(tensor.grad) for tensor in inputs)
    with recorder.apart() as weights:
        for queue in later_queues(stage):
            while queue:
                queue.pop(0)()
    left = recorder.live - start - sum(_bytes(tensor.grad) for tensor in inputs)
    return MicroBatchCost(
        Pass(held, forward.peak, forward.traffic),
        Pass(own - held, backward.peak, backward.traffic),
        Pass(left - own, weights.peak, weights.traffic),
    )


def _inputs(stage: Stage, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    if stage.model.pre_process:
        return (torch.zeros(shape, dtype=torch.int64, device="cpu"),)
    return tuple(tensor.requires_grad_() for tensor in _between(stage, shape))


def _between(stage: Stage, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return what a stage gets from the one before, or hands to the next."""
    hidden = torch.empty(shape_of_part(stage.model, *shape), dtype=stage.dtype, device="cpu")
    return (hidden, torch.zeros((), dtype=torch.float32, device="cpu")) if stage.routed else (hidden,)


def _bytes(values: Any) -> int:
    tensors = values if isinstance(values, tuple) else (values,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def later_queues(stage: Stage) -> list[list[Callable[[], None]]]:
    """Return where layers put the computations of weight gradients that a schedule wants later."""
    modules = [module for module in stage.modules() if isinstance(module, GemmModule)]
    return [module._later for module in modules if module._later is not None]


def replay(pipeline: Pipeline, costs: list[StageCost], shape: tuple[int, int], recorder: Recorder) -> None:
    """Run the schedule of a step, where each stage has the costs at its place in place of its layers.

    Called inside `recorder`. The stages of the pipeline cannot be used afterwards.
    """
    for stage, cost in zip(pipeline.stages, costs, strict=True):
        stage.forward = _Replayed(stage, cost, shape, recorder)  # pyright: ignore[reportAttributeAccessIssue]
    ids = torch.zeros(shape, dtype=torch.int64, device="cpu")
    pipeline.forward_backward([{"input_ids": ids}] * pipeline.micro_batches)


class _Replayed:
    """The forward pass of a stage that computes nothing. A micro-batch is the first where no other came before."""

    def __init__(self, stage: Stage, cost: StageCost, shape: tuple[int, int], recorder: Recorder) -> None:
        self.stage, self.cost, self.shape, self.recorder = stage, cost, shape, recorder
        self.seen = 0
        self.anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)

    def __call__(self, *inputs: Tensor, **_: Any) -> Any:
        self.seen += 1
        found = _CostOnly.apply(self, self.cost.first if self.seen == 1 else self.cost.further, self.anchor, *inputs)
        return found[0] if len(found) == 1 else found


class _CostOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: _Replayed, cost: MicroBatchCost, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.of, ctx.cost = of, cost
        ctx.inputs = [(t.shape, t.dtype) if t.is_floating_point() else None for t in inputs]
        of.recorder.add(cost.forward.held, cost.forward.peak, cost.forward.traffic)
        if not of.stage.model.post_process:
            return _between(of.stage, of.shape)
        of.stage.losses.append(torch.zeros(4, dtype=torch.float32, device="cpu"))
        return (torch.zeros((), dtype=torch.float32, device="cpu"),)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        of, cost = ctx.of, ctx.cost
        of.recorder.add(cost.backward.held, cost.backward.peak, cost.backward.traffic)
        queues = later_queues(of.stage)
        if queues:
            weights = cost.weights
            queues[0].append(lambda: of.recorder.add(weights.held, weights.peak, weights.traffic))
        gradients = [None if what is None else torch.empty(what[0], dtype=what[1], device="cpu") for what in ctx.inputs]
        return None, None, None, *gradients
