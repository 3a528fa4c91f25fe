"""The layouts that a number of ranks allows, planned one by one: which of them fit, and how fast each is at best."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from te_models.layers.distributed.context_parallel import CpCommType

from ..config import ConfigError, ModelConfig
from ..layouts import Facts, check_layout_rules
from ..training.config import ParallelConfig, TrainConfig
from .process import model_of, plan_each
from .result import Hardware, Plan

if TYPE_CHECKING:
    from .guess import Guess

Layout = dict[str, Any]
"""Keys of [parallel] with their values: sizes, and choices such as "cp_comm_type"."""


@dataclass(frozen=True)
class Refused:
    """A layout that `te-models train` refuses, and its sentence. sizes, options: as of a `Plan`."""

    sizes: Layout
    options: Layout
    reason: str

    @classmethod
    def of(cls, layout: Layout, error: object) -> Refused:
        """Return what says that `layout` is refused with this error."""
        options = {"cp_comm_type": layout["cp_comm_type"]}
        return cls({name: layout[name] for name in layout if name not in options}, options, str(error))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"sizes": self.sizes, "options": self.options, "refused": self.reason}


@dataclass(frozen=True)
class Estimated:
    """A layout that is not planned, because a rough estimate says that others are faster. sizes, options: as of a
    `Plan`; step_s: seconds of a step, mfu: model FLOPs utilization, both estimated."""

    sizes: Layout
    options: Layout
    step_s: float
    mfu: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"sizes": self.sizes, "options": self.options, "estimated_step_s": self.step_s}


Told = Callable[[int, int], object]
"""Is told how many plans of how many are made."""

ENOUGH, MOST = 12, 60
"""How many layouts that fit end the search, and how many that are planned."""


@dataclass
class _Search:
    """Plans of runs, and what they say of those that are not planned. activations: see `Guess.memory`."""

    ranks: int
    hardware: Hardware
    told: Told | None
    planned: list[tuple[Plan, TrainConfig]]
    refused: list[Refused]
    activations: float = 30.0
    asked: int = 0

    def plan(self, some: Sequence[tuple[Layout, TrainConfig]], *, refused: bool) -> list[Plan | ConfigError]:
        """Plan runs, and return the plans in their order. refused: what is refused is told, too."""
        told, before = self.told, self.asked

        def count(done: int, of: int) -> None:
            self.asked = before + of
            if told is not None:
                told(before + done, before + of)

        plans = plan_each([run for _, run in some], self.ranks, self.hardware, count)
        for (its, run), plan in zip(some, plans, strict=True):
            if isinstance(plan, Plan):
                self.planned.append((plan, run))
            elif refused:
                self.refused.append(Refused.of(its, plan))
        self.planned.sort(key=lambda each: _rank(each[0]))
        return plans

    def best_first(self, runs: list[tuple[Layout, TrainConfig, Guess]]) -> list[tuple[Layout, TrainConfig, Guess]]:
        """Plan the runs that by estimate fit and are fastest, until `ENOUGH` fit; return the others."""
        limit, seen = self.hardware.memory_gib * 2**30, []

        def order(each: tuple[Layout, TrainConfig, Guess]) -> tuple[bool, float]:
            memory = each[2].memory(self.activations)
            return memory > limit, memory if memory > limit else -each[2].mfu

        left = runs
        while left and len(self.planned) < MOST and sum(plan.fits for plan, _ in self.planned) < ENOUGH:
            left = sorted(left, key=order)
            some, left = left[: os.cpu_count() or 1], left[os.cpu_count() or 1 :]
            plans = self.plan([(its, run) for its, run, _ in some], refused=True)
            pairs = zip(plans, some, strict=True)
            seen += [plan.activations / guess.flight for plan, (_, _, guess) in pairs if isinstance(plan, Plan)]
            self.activations = median(seen) if seen else self.activations
        return left


def plan_layouts(
    config: TrainConfig, ranks: int, hardware: Hardware, *, told: Told | None = None
) -> list[Plan | Refused | Estimated]:
    """Return the plans of the layouts in `layouts_of` that are fastest by a rough estimate, at least as many as
    `ENOUGH` that fit where there are, and of the best of them with each of `choices_of` too: those that fit first, by
    model FLOPs utilization; then layouts that are estimated alone, and refused ones last.

    As many are planned at a time as the machine has cores. told: of the progress.
    """
    from .guess import Guess

    search = _Search(ranks, hardware, told, [], [])
    runs, model, data = [], model_of(config), config.data
    length = {"sequence_length": data.sequence_length, "tokens": data.micro_batch_size * data.sequence_length}
    batch = data.global_batch_size
    micro_batches = data.gradient_accumulation if batch is None else batch // data.micro_batch_size
    for its in layouts_of(model, ranks, hardware.node_ranks, micro_batches, **length):
        try:
            run = _run(config, ranks, its)
            runs.append((its, run, Guess.of(run, model, ranks, hardware)))
        except ConfigError as error:
            search.refused.append(Refused.of(its, error))
    left = search.best_first(runs)
    for choices in (choices_of, dispatches_of):
        some = [({}, run) for _, best in search.planned[:REFINED] for run in choices(best, model)]
        search.plan(some, refused=False)
    slower = sorted(left, key=lambda each: -each[2].mfu)
    estimated = [
        Estimated(refused.sizes, refused.options, guess.step_s, guess.mfu)
        for refused, guess in ((Refused.of(its, ""), guess) for its, _, guess in slower)
    ]
    return [*(plan for plan, _ in search.planned), *estimated, *search.refused]


REFINED = 6
"""How many of the best layouts are planned with other schedules, reductions and dispatchers."""


def choices_of(run: TrainConfig, model: ModelConfig) -> Iterator[TrainConfig]:
    """Yield a run in its layout with other pipeline schedules, numbers of virtual stages, and ways to share gradients
    and optimizer states among data-parallel ranks."""
    stages, sharded = run.parallel.pipeline_model_parallel_size, run.parallel.data_parallel_shard_size != 1
    update: dict[str, Any] = {"data_parallel_replicate_size": None, "data_parallel_shard_size": 1}
    update["use_distributed_optimizer"] = True
    schedules: list[dict[str, Any]] = [{}]
    if stages > 1:
        most = model.num_layers // stages
        schedules += [
            {"pipeline_schedule": "Interleaved1F1B", "virtual_pipeline_model_parallel_size": v}
            for v in _powers(2, min(most, 8))
            if v > 1
        ]
    later = [{"pipeline_schedule": name} for name in ("ZBVZeroBubble", "DualPipeV")] if stages > 1 else []
    found = [schedule for schedule in schedules if schedule]
    found += [{"reduce_gradients": "step"}] if sharded and stages == 1 else []
    found += [update | schedule for schedule in (*schedules, *later)]
    yield from _changed(run, found)


def dispatches_of(run: TrainConfig, model: ModelConfig) -> Iterator[TrainConfig]:
    """Yield a run with the other ways in which tokens reach distributed experts, and beside shared experts."""
    if model.moe is None or run.parallel.expert_model_parallel_size == 1:
        return
    beside = [{"moe_shared_expert_overlap": True}] if model.moe.shared_expert_intermediate_size is not None else []
    yield from _changed(run, [{"expert_dispatch": "deepep"}, *beside])


def _changed(run: TrainConfig, changes: Iterable[dict[str, Any]]) -> Iterator[TrainConfig]:
    for some in changes:
        with contextlib.suppress(ConfigError):  # not a choice that this run has
            yield run.replace(parallel=run.parallel.replace(**some))


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
"""Options that a run has for its own layout; the search begins without them, and proposes them by `choices_of`."""


def _run(config: TrainConfig, ranks: int, layout: Layout) -> TrainConfig:
    fixed = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    shards = -1 if ranks > math.prod(layout[name] for name in fixed) else 1
    every = {name: getattr(ParallelConfig(), name) for name in _OF_ONE_LAYOUT}
    every |= {"data_parallel_replicate_size": None, "data_parallel_shard_size": shards, **layout}
    return config.replace(parallel=config.parallel.replace(**every))


def _rank(found: Plan) -> tuple[int, float]:
    return (0, -found.mfu) if found.fits else (1, found.memory)
