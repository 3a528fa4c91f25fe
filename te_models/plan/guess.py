"""A rough estimate of a layout, in a millisecond, that says which layouts are worth seconds of planning.

What ranks send is counted by formulas, per layer, and waits as a plan's do. Of memory there is what stays, and what
activations take beside it in proportion to the layers in flight: plans that are made say what the proportion is.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.param_shapes import is_expert_stack

from ..config import ModelConfig
from ..parallel.dims import ParallelDims
from ..parallel.stage_layout import StageLayout, stages_of
from ..training.config import TrainConfig
from ..training.data.batch_size import with_global_batch
from ..training.ranks.data_parallel import Ranks
from ..training.ranks.layout import RankLayout
from ..training.trained import step_flops_per_token
from .cost import reached, waits_of
from .micro_batch import Recorded
from .result import Hardware, Moved, Traffic
from .stretches import StretchRecipes

_UPDATE = 12
"""Bytes that stay for each parameter that a rank updates: master and two moments."""
Saves = tuple[bool, tuple[str, ...], bool]
"""What decides how much layers keep: whether they are computed again, which modules are otherwise, and whether weight
gradients are computed later."""


@dataclass(frozen=True)
class Guess:
    """step_s: seconds of a step. mfu: its model FLOPs utilization. state: bytes of parameters, gradients and optimizer;
    flight: bytes of the hidden states of all layers in flight; layer: of one layer. saves: what decides how many times
    that layers keep."""

    step_s: float
    mfu: float
    state: float
    flight: float
    layer: float
    saves: Saves

    def memory(self, activations: float) -> float:
        """Return the bytes at the highest point, where layers keep `activations` times their hidden states, or those
        alone where they are computed again, one at a time."""
        return self.state + (self.flight + activations * self.layer if self.saves[0] else activations * self.flight)

    def activations(self, memory: float) -> float:
        """Return what `memory` was asked with, where that is its answer."""
        beside = memory - self.state
        return (beside - self.flight) / self.layer if self.saves[0] else beside / self.flight


class Guesser:
    """Estimates of runs of one model on this many ranks that differ in their layouts. config: one of them."""

    def __init__(self, config: TrainConfig, model: ModelConfig, ranks: int, hardware: Hardware) -> None:
        self.model, self.ranks, self.hardware = model, ranks, hardware
        self.recipes = StretchRecipes.at(config, model, 0)
        self.flops_per_token = step_flops_per_token(config, model)

    def guess(self, config: TrainConfig) -> Guess:
        """Return the estimate of a run. Raises ConfigError where the ranks cannot be divided so."""
        model, parallel, ranks = self.model, config.parallel, self.ranks
        dims = ParallelDims.of(parallel.to_dict(), ranks)
        layout = RankLayout(dims, None, Ranks(), Ranks(), parallel.sequence_parallel, stages_of(parallel))
        if layout.stages is not None:
            layout.stages.layers(model.num_layers)
        config = with_global_batch(config, dims.data_ranks)
        tp, pp, cp = dims.tensor_model_parallel_size, dims.pipeline_model_parallel_size, dims.context_parallel_size
        micro_batches, tokens = config.data.gradient_accumulation, config.micro_batch_tokens / cp
        flops = self.flops_per_token * config.micro_batch_tokens * micro_batches / (tp * cp * pp)
        found = Recorded()
        moved = _layers(config, model, dims, tokens)
        parameters, gradients = _parameters(config, model, dims)
        hidden = tokens * model.hidden_size * _width(config) / (tp if parallel.sequence_parallel else 1)
        if layout.stages is not None:
            number = 2 * (layout.stages.stages_per_rank or 1)
            moved["send", "pp"] = Traffic(number, 0, number * hidden)
        both = {key: its.times(micro_batches) for key, its in (moved | parameters).items()} | gradients
        found.each, found.once = ({}, both) if pp > 1 else (moved | parameters, gradients)
        step_s = sum(waits_of(config, model, layout, found, flops, self.hardware, self.recipes)[0].values())
        mfu = flops / step_s / (self.hardware.tflops * 1e12)
        flight = hidden * model.num_layers * _in_flight(layout.stages, micro_batches)
        later = layout.stages is not None and layout.stages.is_later
        saves = config.model.activation_checkpointing, config.model.recompute_modules, later
        return Guess(step_s, mfu, _state(config, model, dims), flight, hidden, saves)


def _in_flight(stages: StageLayout | None, micro_batches: int) -> float:
    """Return how many layers' activations a rank holds at most, as a part of the layers of the model."""
    if stages is None:
        return 1.0
    per_rank = stages.stages_per_rank or 1
    if stages.schedule.lower() in ("gpipe", "loopedbfs"):
        return micro_batches / stages.ranks
    if per_rank == 1 or stages.is_v_shaped:
        return min(1.0, micro_batches / stages.ranks)
    ahead = 2 * (stages.ranks - 1) + (per_rank - 1) * stages.ranks + 1
    return min(ahead, micro_batches * per_rank) / stages.stages


def _width(config: TrainConfig) -> int:
    return 4 if config.precision.dtype == "fp32" else 2


@lru_cache(maxsize=8)
def _whole(model: ModelConfig) -> tuple[int, int]:
    shapes = expected_tensors(model, "grouped").items()
    experts = sum(math.prod(shape) for name, shape in shapes if is_expert_stack(name))
    return sum(math.prod(shape) for _, shape in shapes) - experts, experts


def _sizes(model: ModelConfig, dims: ParallelDims) -> list[tuple[float, float]]:
    """Return how many parameters a rank has before FSDP2 shards them, and how many ranks have the same: beside experts,
    and of experts."""
    dense, experts = _whole(model)
    stages, etp = dims.pipeline_model_parallel_size, dims.expert_tensor_parallel_size or 1
    own = dims.tensor_model_parallel_size * stages, dims.expert_model_parallel_size * etp * stages
    return [(size / parts, dims.ranks / parts) for size, parts in zip((dense, experts), own, strict=True)]


def _state(config: TrainConfig, model: ModelConfig, dims: ParallelDims) -> float:
    """Return the bytes of parameters, gradients and optimizer: gradients of a micro-batch and, where ranks share the
    update alone, of the step beside them."""
    width, parallel = _width(config), config.parallel
    shards = dims.data_parallel_shard_size * dims.context_parallel_size if dims.is_sharded else 1
    updated = dims.data_ranks * dims.context_parallel_size if parallel.use_distributed_optimizer else shards
    once = 4 if parallel.use_distributed_optimizer else 0
    return sum(
        size * ((width + max(width, 4 * dims.is_sharded)) / min(shards, copies) + once + _UPDATE / min(updated, copies))
        for size, copies in _sizes(model, dims)
    )


def _layers(config: TrainConfig, model: ModelConfig, dims: ParallelDims, tokens: float) -> Moved:
    """Return what layers that are split, share sequences or have distributed experts send for a micro-batch."""
    tp, pp, cp = dims.tensor_model_parallel_size, dims.pipeline_model_parallel_size, dims.context_parallel_size
    layers, hidden = model.num_layers / pp, tokens * model.hidden_size * _width(config)
    whole, modules = config.model.activation_checkpointing, config.model.recompute_modules
    again = [whole or any(each.endswith(part) for each in modules) for part in ("self_attention", "mlp")]
    saved = "all_to_all" in config.model.recompute_save_ops
    found: Moved = {}
    if tp > 1:  # each of two products of a layer: 3 gathers and 2 reductions, of which one each is the forward pass's
        found["all_gather", "tp"] = Traffic.of("all_gather", (10 + 2 * sum(again)) * layers * hidden, tp)
    if cp > 1:
        sizes = [m.key_value_sizes for m in map(model.attention_of, range(model.num_layers)) if m is not None]
        each = sum(groups * (keys + values) for groups, keys, values in sizes) / pp / tp
        nbytes = (3 + again[0]) * tokens * each * _width(config) * cp
        found["all_gather", "cp"] = Traffic.of("all_gather", nbytes, cp)
    if model.moe is None:
        return found
    ep, etp = dims.expert_model_parallel_size, dims.expert_tensor_parallel_size or 1
    mixtures, times = sum(map(model.is_moe_layer, range(model.num_layers))) / pp, float(model.moe.moe_router_topk)
    if etp > 1:  # rows of experts that are split, once in each pass
        split = "etp" if dims.splits_experts_apart else "tp"
        found["all_reduce", split] = Traffic.of("all_reduce", (2 + again[1]) * mixtures * times * hidden, etp)
    if ep > 1:
        shared = tp if dims.splits_experts_apart else 1
        if config.parallel.expert_dispatch == "deepep":
            times = reached(model, ep, limited=False)
        ways = 4 + 2 * (again[1] and not saved)
        found["all_to_all", "ep"] = Traffic.of("all_to_all", ways * mixtures * hidden * times / shared, ep)
    return found


def _parameters(config: TrainConfig, model: ModelConfig, dims: ParallelDims) -> tuple[Moved, Moved]:
    """Return what ranks send of parameters and gradients for each micro-batch, and for each step."""
    width, several = _width(config), _sizes(model, dims)

    def moved(kind: str, nbytes: float) -> Traffic:
        return sum((Traffic.of(kind, nbytes * size, copies) for size, copies in several if copies > 1), Traffic())

    if config.parallel.use_distributed_optimizer:
        both = {"reduce_scatter": 4, "all_gather": width}
        return {}, {(kind, "dp"): moved(kind, nbytes) for kind, nbytes in both.items()}
    if not dims.is_sharded:
        return {}, {("all_reduce", "dp"): moved("all_reduce", 4)}
    gathered = {("all_gather", "dp_shard"): moved("all_gather", 2 * width)}
    reduced = {("reduce_scatter", "dp_shard"): moved("reduce_scatter", 4)}
    once = dims.pipeline_model_parallel_size > 1 or config.parallel.reduces_once
    return (gathered, reduced) if once else (gathered | reduced, {})
