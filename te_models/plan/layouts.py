"""The layouts that a number of ranks allows, planned one by one: which of them fit, and how fast each is at best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import ConfigError, ModelConfig
from ..training.config import TrainConfig
from .estimate import Hardware, Plan, model_of
from .process import plan_each

Layout = dict[str, int]


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
    for its in layouts_of(model_of(config), ranks, hardware.node_ranks, config.data.gradient_accumulation):
        try:
            runs.append(_run(config, ranks, its))
            sizes.append(its)
        except ConfigError as error:
            found.append(Refused(its, str(error)))
    for its, plan in zip(sizes, plan_each(runs, ranks, hardware), strict=True):
        found.append(Refused(its, str(plan)) if isinstance(plan, ConfigError) else plan)
    return sorted(found, key=_rank)


MOST_STAGES = 16


def layouts_of(model: ModelConfig, ranks: int, node_ranks: int, micro_batches: int = 1) -> Iterator[Layout]:
    """Yield the sizes to try: tensor parallelism inside a node by powers of two, pipeline stages over 1, 4 and 16 ranks
    where a step has as many micro-batches, experts over 1, 4, 16, ... ranks, and everything sharded over the ranks that
    are left."""
    experts = 1 if model.moe is None else model.moe.num_moe_experts
    for tp in _powers(2, min(node_ranks, ranks)):
        for pp in _powers(4, min(MOST_STAGES, micro_batches, model.num_layers, ranks // tp)):
            for ep in _powers(4, min(experts, ranks // tp // pp)):
                if ranks % (tp * pp) == 0 and ranks // tp // pp % ep == 0 and experts % ep == 0:
                    yield {
                        "tensor_model_parallel_size": tp,
                        "pipeline_model_parallel_size": pp,
                        "expert_model_parallel_size": ep,
                    }


def _powers(base: int, most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= base


def _run(config: TrainConfig, ranks: int, sizes: Layout) -> TrainConfig:
    shards = -1 if ranks > sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"] else 1
    every = {"data_parallel_replicate_size": None, "data_parallel_shard_size": shards, **sizes}
    return config.replace(parallel=config.parallel.replace(**every))


def _rank(found: Plan | Refused) -> tuple[int, float]:
    if isinstance(found, Refused):
        return 2, 0.0
    return (0, -found.mfu) if found.fits else (1, found.memory)
