"""The layouts that a number of ranks allows, planned one by one: which of them fit, and how fast each is at best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

from te_models.checkpoints import expected_tensors
from te_models.layers.distributed.context_parallel import CpCommType

from ..config import ConfigError, ModelConfig
from ..layouts import Facts, check_layout_rules
from ..training.config import ParallelConfig, TrainConfig
from .process import ask_planner, read_plan
from .result import Hardware, Plan

Layout = dict[str, Any]
"""Keys of [parallel] with their values: sizes, and choices such as "cp_comm_type"."""


def sizes_of(layout: Layout) -> Layout:
    """Return the sizes of a layout, without its choices."""
    return {name: value for name, value in layout.items() if name != "cp_comm_type"}


@dataclass(frozen=True)
class Refused:
    """A layout that `te-models train` refuses, and its sentence. sizes, options: as of a `Plan`."""

    sizes: Layout
    options: Layout
    reason: str

    @classmethod
    def of(cls, layout: Layout, error: object) -> Refused:
        """Return what says that `layout` is refused with this error."""
        return cls(sizes_of(layout), {"cp_comm_type": layout["cp_comm_type"]}, str(error))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"sizes": self.sizes, "options": self.options, "refused": self.reason}


@dataclass(frozen=True)
class Estimated:
    """A layout that is not planned, because a rough estimate says that others are faster. sizes, options: as of a
    `Plan`, with the choices that are fastest by estimate; step_s: seconds of a step, mfu: model FLOPs utilization, both
    estimated."""

    sizes: Layout
    options: Layout
    step_s: float
    mfu: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        estimates = {"estimated_step_s": self.step_s, "estimated_mfu": self.mfu}
        return {"sizes": self.sizes, "options": self.options, **estimates}


Told = Callable[[int, int], object]
"""Is told how many plans of how many that are asked for are made."""

ENOUGH, MOST = 8, 24
"""How many layouts that fit end the search, and how many that are planned."""


def plan_layouts(
    config: TrainConfig, ranks: int, hardware: Hardware, *, told: Told | None = None
) -> list[Plan | Refused | Estimated]:
    """Return the plans of the layouts in `layouts_of`, with the choices in `CHOICES`, that are fastest by a rough
    estimate, at least as many as `ENOUGH` that fit where there are: those that fit first, by model FLOPs utilization;
    then layouts that are estimated alone, and refused ones last.

    As many are planned at a time as the machine has cores. told: of the progress.
    """
    limits = {"enough": ENOUGH, "most": MOST}
    asked = {"config": config.to_dict(), "ranks": ranks, "hardware": asdict(hardware), "limits": limits}
    return [_found(values) for values in ask_planner({"search": asked}, told)]


def _found(values: dict[str, Any]) -> Plan | Refused | Estimated:
    if "refused" in values and "sizes" in values:
        return Refused(values["sizes"], values["options"], values["refused"])
    if "estimated_step_s" in values:
        return Estimated(values["sizes"], values["options"], values["estimated_step_s"], values["estimated_mfu"])
    found = read_plan(values)
    if isinstance(found, ConfigError):
        raise found
    return found


Change = tuple[dict[str, Any], dict[str, Any]]
"""Keys of [parallel] and of [model] with other values."""


def updates_of(run: TrainConfig, model: ModelConfig) -> Iterator[Change]:
    """Yield the ways in which ranks share parameters, gradients and optimizer states, each with the pipeline schedules
    and numbers of virtual stages that it allows."""
    stages = run.parallel.pipeline_model_parallel_size
    several = run.parallel.data_parallel_shard_size != 1 or run.parallel.use_distributed_optimizer
    each = {"data_parallel_replicate_size": None, "use_distributed_optimizer": False, "reduce_gradients": None}
    schedules: list[dict[str, Any]] = [{"pipeline_schedule": "1F1B", "virtual_pipeline_model_parallel_size": None}]
    later: list[dict[str, Any]] = []
    if stages > 1:
        virtual = [v for v in _powers(2, min(model.num_layers // stages, 8)) if v > 1]
        for found, name in ((schedules, "Interleaved1F1B"), (later, "InterleavedZeroBubble")):
            found += [{"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": v} for v in virtual]
        v_shaped = ("ZBVZeroBubble", "DualPipeV")
        later += [{"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": None} for name in v_shaped]
    sharded = [each | {"data_parallel_shard_size": -1}] if several else [each | {"data_parallel_shard_size": 1}]
    if several and stages == 1:
        sharded.append(sharded[0] | {"reduce_gradients": "step"})
    zero = each | {"data_parallel_shard_size": 1, "use_distributed_optimizer": True}
    for schedule in schedules:
        yield from ((ways | schedule, {}) for ways in (*sharded, zero))
    yield from ((zero | schedule, {}) for schedule in later)


def recomputations_of(run: TrainConfig, model: ModelConfig) -> Iterator[Change]:
    """Yield what the backward pass may compute again: nothing, what is in the MLPs or in attention, or all of each
    layer."""
    nothing = {"activation_checkpointing": False, "recompute_modules": (), "recompute_save_ops": ()}
    yield {}, nothing
    for part in ("mlp", "self_attention"):
        if any(f".{part}." in name for name in expected_tensors(model, "grouped")):
            yield {}, nothing | {"recompute_modules": (f"decoder.layers.*.{part}",)}
    yield {}, nothing | {"activation_checkpointing": True}


def dispatches_of(run: TrainConfig, model: ModelConfig) -> Iterator[Change]:
    """Yield the ways in which tokens reach distributed experts, and beside shared experts."""
    if model.moe is None or run.parallel.expert_model_parallel_size == 1:
        return
    plain = {"expert_dispatch": "all_to_all", "moe_shared_expert_overlap": False}
    yield plain, {}
    yield plain | {"expert_dispatch": "deepep"}, {}
    if model.moe.shared_expert_intermediate_size is not None:
        yield plain | {"moe_shared_expert_overlap": True}, {}


CHOICES = (updates_of, recomputations_of, dispatches_of)
"""What a layout can choose beside its sizes, one thing after the other."""


def changed(run: TrainConfig, changes: Iterable[Change]) -> Iterator[TrainConfig]:
    """Yield a run with each of the changes that it can have."""
    for parallel, source in changes:
        with contextlib.suppress(ConfigError):  # not a choice that this run has
            yield run.replace(parallel=run.parallel.replace(**parallel), model=run.model.replace(**source))


MOST_STAGES = 64
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
    """Yield the layouts to try: tensor parallelism inside a node by powers of two, with sequence parallelism where the
    tokens of a micro-batch can be shared; pipeline stages over each number of ranks that divides them, up to the
    micro-batches of a step and the layers; long sequences over 1, 4 and 16 ranks, by each way that attention has;
    experts over 1, 2, 4, ... ranks, split as the other layers or not at all; and everything sharded over the ranks
    that are left."""
    experts = 1 if model.moe is None else model.moe.num_moe_experts
    drops = max(model.hidden_dropout, model.embedding_dropout) > 0
    for tp, pp, cp in product(
        _powers(2, min(node_ranks, ranks)),
        _divisors(ranks, min(MOST_STAGES, micro_batches, model.num_layers)),
        _powers(4, max(1, min(sequence_length // FEWEST_TOKENS, ranks))),
    ):
        if ranks % (tp * pp * cp):
            continue
        for etp in (tp, 1) if tp > 1 and experts > 1 else (tp,):
            over = ranks // pp // etp
            for ep in _powers(2, min(experts, over)):
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
    yield "all_gather"  # whatever else a layout is refused for
    for way in get_args(CpCommType) if ranks > 1 and attends else ():
        if way == "all_gather":
            continue
        try:
            check_layout_rules(Facts(model=model, tp=tp, cp=ranks, cp_comm_type=way))
        except ConfigError:
            continue
        yield way


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, most + 1) if number % size == 0]


def _powers(base: int, most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= base


_OF_ONE_LAYOUT = (
    *("virtual_pipeline_model_parallel_size", "pipeline_schedule", "pipeline_split", "pipeline_balance"),
    *("use_distributed_optimizer", "reduce_gradients"),
)
"""Options that a run has for its own layout; the search begins without them, and proposes them by `CHOICES`."""


def run_of(config: TrainConfig, ranks: int, layout: Layout) -> TrainConfig:
    """Return a run in a layout, without choices. Raises ConfigError for what a configuration refuses."""
    fixed = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    shards = -1 if ranks > math.prod(layout[name] for name in fixed) else 1
    every = {name: getattr(ParallelConfig(), name) for name in _OF_ONE_LAYOUT}
    every |= {"data_parallel_replicate_size": None, "data_parallel_shard_size": shards, **layout}
    return config.replace(parallel=config.parallel.replace(**every))
