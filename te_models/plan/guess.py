"""A rough estimate of a layout, in a millisecond, that says which layouts are worth seconds of planning.

What ranks send is counted by formulas, per layer, and waits as a plan's do. Of memory there is what stays, and what
activations take beside it in proportion to the layers in flight: plans that are made say what the proportion is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.param_shapes import is_expert_stack

from ..config import ModelConfig
from ..parallel.dims import ParallelDims
from ..parallel.stage_layout import stages_of
from ..training.config import TrainConfig
from ..training.data.batch_size import with_global_batch
from ..training.ranks.data_parallel import Ranks
from ..training.ranks.layout import RankLayout
from ..training.trained import step_flops_per_token
from .cost import waits_of
from .micro_batch import Recorded
from .result import Hardware, Moved, Traffic
from .stretches import StretchRecipes

_STATE = 16
"""Bytes that stay for each parameter that a rank updates: gradient, master and two moments."""


@dataclass(frozen=True)
class Guess:
    """step_s: seconds of a step. mfu: its model FLOPs utilization. state: bytes of parameters, gradients and optimizer;
    flight: bytes of the hidden states of all layers in flight."""

    step_s: float
    mfu: float
    state: float
    flight: float

    def memory(self, activations: float) -> float:
        """Return the bytes at the highest point, where activations are `activations` times `flight`."""
        return self.state + activations * self.flight

    @classmethod
    def of(cls, config: TrainConfig, model: ModelConfig, ranks: int, hardware: Hardware) -> Self:
        """Return the estimate of a run on this many ranks. Raises ConfigError where these cannot be divided so."""
        dims, parallel = ParallelDims.of(config.parallel.to_dict(), ranks), config.parallel
        layout = RankLayout(dims, None, Ranks(), Ranks(), parallel.sequence_parallel, stages_of(parallel))
        config = with_global_batch(config, dims.data_ranks)
        tp, pp, cp = dims.tensor_model_parallel_size, dims.pipeline_model_parallel_size, dims.context_parallel_size
        micro_batches, tokens = config.data.gradient_accumulation, config.micro_batch_tokens / cp
        flops = step_flops_per_token(config, model) * config.micro_batch_tokens * micro_batches / (tp * cp * pp)
        found = Recorded()
        moved = _layers(config, model, dims, tokens)
        parameters, gradients = _parameters(config, model, dims)
        if pp > 1:
            sent = tokens * model.hidden_size * _width(config) / (tp if parallel.sequence_parallel else 1)
            number = 2 * (layout.stages.stages_per_rank or 1) if layout.stages else 0
            moved["send", "pp"] = Traffic(number, 0, number * sent)
        both = {key: its.times(micro_batches) for key, its in (moved | parameters).items()} | gradients
        found.each, found.once = ({}, both) if pp > 1 else (moved | parameters, gradients)
        recipes = StretchRecipes.at(config, model, 0)
        step_s = sum(waits_of(config, model, layout, found, flops, hardware, recipes)[0].values())
        split = tp if parallel.sequence_parallel else 1
        flight = tokens * model.hidden_size * _width(config) * model.num_layers / split
        dense, experts = _sizes(model, dims)
        alone = 1 if parallel.data_parallel_shard_size == 1 else dims.data_parallel_shard_size * cp
        updated = dims.data_ranks * cp if parallel.use_distributed_optimizer else alone
        state = sum(
            size * (_width(config) / min(alone, copies) + _STATE / min(updated, copies))
            for size, copies in ((dense, ranks / (tp * pp)), (experts, _copies_of_experts(dims)))
        )
        return cls(step_s, flops / step_s / (hardware.tflops * 1e12), state, flight)


def _width(config: TrainConfig) -> int:
    return 4 if config.precision.dtype == "fp32" else 2


@lru_cache(maxsize=8)
def _whole(model: ModelConfig) -> tuple[int, int]:
    shapes = expected_tensors(model, "grouped").items()
    experts = sum(math.prod(shape) for name, shape in shapes if is_expert_stack(name))
    return sum(math.prod(shape) for _, shape in shapes) - experts, experts


def _sizes(model: ModelConfig, dims: ParallelDims) -> tuple[float, float]:
    """Return how many parameters a rank has before FSDP2 shards them: beside experts, and of experts."""
    dense, experts = _whole(model)
    stages, etp = dims.pipeline_model_parallel_size, dims.expert_tensor_parallel_size or 1
    own = dims.tensor_model_parallel_size * stages, dims.expert_model_parallel_size * etp * stages
    return dense / own[0], experts / own[1]


def _copies_of_experts(dims: ParallelDims) -> float:
    each = dims.expert_model_parallel_size * (dims.expert_tensor_parallel_size or 1)
    return dims.ranks / (dims.pipeline_model_parallel_size * each)


def _layers(config: TrainConfig, model: ModelConfig, dims: ParallelDims, tokens: float) -> Moved:
    """Return what layers that are split, share sequences or have distributed experts send for a micro-batch."""
    tp, pp, cp = dims.tensor_model_parallel_size, dims.pipeline_model_parallel_size, dims.context_parallel_size
    layers, hidden = model.num_layers / pp, tokens * model.hidden_size * _width(config)
    found: Moved = {}
    if tp > 1:  # each of two products of a layer: 3 gathers and 2 reductions
        found["all_gather", "tp"] = Traffic(1, 0, 10 * layers * hidden * (tp - 1) / tp)
    if cp > 1:
        sizes = [m.key_value_sizes for m in map(model.attention_of, range(model.num_layers)) if m is not None]
        each = sum(groups * (keys + values) for groups, keys, values in sizes) / pp / tp
        found["all_gather", "cp"] = Traffic(1, 0, 3 * tokens * each * _width(config) * (cp - 1))
    ep = dims.expert_model_parallel_size
    if ep > 1 and model.moe is not None:
        mixtures = sum(map(model.is_moe_layer, range(model.num_layers))) / pp
        shared = tp if dims.splits_experts_apart else 1
        sent = 4 * mixtures * hidden * model.moe.moe_router_topk / shared * (ep - 1) / ep
        found["all_to_all", "ep"] = Traffic(1, 0, sent)
    return found


def _parameters(config: TrainConfig, model: ModelConfig, dims: ParallelDims) -> tuple[Moved, Moved]:
    """Return what ranks send of parameters and gradients for each micro-batch, and for each step."""
    dense, experts = _sizes(model, dims)
    several = [(dense, dims.data_ranks * dims.context_parallel_size), (experts, _copies_of_experts(dims))]
    sent = sum(size * (copies - 1) / copies for size, copies in several if copies > 1)
    if config.parallel.use_distributed_optimizer:
        both = {"reduce_scatter": 4, "all_gather": _width(config)}
        return {}, {(kind, "dp"): Traffic(1, 0, nbytes * sent) for kind, nbytes in both.items()}
    if not dims.is_sharded:
        return {}, {("all_reduce", "dp"): Traffic(1, 0, 8 * sent)}
    gathered = {("all_gather", "dp_shard"): Traffic(1, 0, 2 * sent * _width(config))}
    reduced = {("reduce_scatter", "dp_shard"): Traffic(1, 0, 4 * sent)}
    once = dims.pipeline_model_parallel_size > 1 or config.parallel.reduces_once
    return (gathered, reduced) if once else (gathered | reduced, {})
