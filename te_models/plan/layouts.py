"""The layouts that a number of ranks allows, planned one by one: which of them fit, and how fast each is at best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from te_models.layers.distributed.context_parallel import CpCommType

from ..config import ConfigError, ModelConfig
from ..model.parallel import check_shared_sequences
from ..training.config import TrainConfig
from .process import model_of, plan_each
from .result import Hardware, Plan

Layout = dict[str, Any]
"""Sizes by name; "sequence_parallel" is a bool, and "cp_comm_type" one of its values."""


@dataclass(frozen=True)
class Refused:
    """A layout that `te-models train` refuses, and its sentence."""

    sizes: Layout
    reason: str


def plan_layouts(config: TrainConfig, ranks: int, hardware: Hardware) -> list[Plan | Refused]:
    """Return the plan of every layout in `layouts_of`: those that fit first, by model FLOPs utilization;
    refused ones last.

    As many are planned at a time as the machine has cores.
    """
    found: list[Plan | Refused] = []
    sizes, runs = [], []
    data = config.data
    length = {"sequence_length": data.sequence_length, "tokens": data.micro_batch_size * data.sequence_length}
    batch = data.global_batch_size
    micro_batches = data.gradient_accumulation if batch is None else batch // data.micro_batch_size
    for its in layouts_of(model_of(config), ranks, hardware.node_ranks, micro_batches, **length):
        try:
            runs.append(_run(config, ranks, its))
            sizes.append(its)
        except ConfigError as error:
            found.append(Refused(its, str(error)))
    for its, plan in zip(sizes, plan_each(runs, ranks, hardware), strict=True):
        found.append(Refused(its, str(plan)) if isinstance(plan, ConfigError) else plan)
    return sorted(found, key=_rank)


MOST_STAGES = 16
FEWEST_TOKENS = 8192
"""Of a sequence, that a rank is to have where ranks share it."""


def layouts_of(
    model: ModelConfig,
    ranks: int,
    node_ranks: int,
    micro_batches: int = 1,
    *,
    sequence_length: int = 1,
    tokens: int = 0,
) -> Iterator[Layout]:
    """Yield the sizes to try: tensor parallelism inside a node by powers of two, with sequence parallelism where the
    tokens of a micro-batch can be shared; pipeline stages over 1, 4 and 16 ranks where a step has as many
    micro-batches; long sequences over 1, 4 and 16 ranks, by each way that attention has; experts over 1, 4,
    16, ... ranks, split as the other layers or not at all; and everything sharded over the ranks that are left."""
    experts = 1 if model.moe is None else model.moe.num_moe_experts
    drops = max(model.hidden_dropout, model.embedding_dropout) > 0
    for tp, pp, cp in product(
        _powers(2, min(node_ranks, ranks)),
        _powers(4, min(MOST_STAGES, micro_batches, model.num_layers, ranks)),
        _powers(4, max(1, min(sequence_length // FEWEST_TOKENS, ranks))),
    ):
        if ranks % (tp * pp * cp):
            continue
        for etp in (tp, 1) if tp > 1 and experts > 1 else (tp,):
            over = ranks // pp // etp
            for ep in _powers(4, min(experts, over)):
                if over % ep == 0 and experts % ep == 0:
                    its = {
                        "tensor_model_parallel_size": tp,
                        "pipeline_model_parallel_size": pp,
                        "context_parallel_size": cp,
                        "expert_model_parallel_size": ep,
                        "expert_tensor_parallel_size": etp,
                        "sequence_parallel": tp > 1 and not drops and tokens // cp % tp == 0,
                    }
                    for way in _ways(model, cp, tp):
                        yield {**its, "cp_comm_type": way}


def _ways(model: ModelConfig, ranks: int, tp: int) -> Iterator[str]:
    """Yield how attention can reach the keys of so many ranks that share sequences."""
    attends = any(model.attention_of(layer) is not None for layer in range(model.num_layers))
    for way in get_args(CpCommType) if ranks > 1 and attends else ("all_gather",):
        try:
            check_shared_sequences(model, ranks, way, tp)
        except ConfigError:
            continue
        yield way


def _powers(base: int, most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= base


def _run(config: TrainConfig, ranks: int, sizes: Layout) -> TrainConfig:
    fixed = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    shards = -1 if ranks > math.prod(sizes[name] for name in fixed) else 1
    every = {"data_parallel_replicate_size": None, "data_parallel_shard_size": shards, **sizes}
    return config.replace(parallel=config.parallel.replace(**every))


def _rank(found: Plan | Refused) -> tuple[int, float]:
    if isinstance(found, Refused):
        return 2, 0.0
    return (0, -found.mfu) if found.fits else (1, found.memory)
