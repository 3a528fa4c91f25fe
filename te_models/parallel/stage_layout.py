"""Which layers each rank of a pipeline has under a schedule, known without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..layouts import Facts, check_layout_rules

_SINGLE = ("1f1b", "gpipe")
_SEVERAL = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
_V_SHAPED = ("zbvzerobubble", "dualpipev")
_LATER = ("interleavedzerobubble", *_V_SHAPED)
"""Names as torch compares them."""


@dataclass(frozen=True)
class StageLayout:
    """Which stages each of `ranks` ranks has under a schedule. stages_per_rank: None means one, or two under schedules
    of several stages a rank. split: how many layers each stage has, in their order; (): as many each. Raises
    ConfigError for a schedule that torch does not know, and for a number of stages that it does not have."""

    ranks: int
    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    split: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.stages_per_rank is None:
            object.__setattr__(self, "stages_per_rank", 1 if self.schedule.lower() in _SINGLE else 2)
        check_layout_rules(Facts(stages=self))

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.ranks * (self.stages_per_rank or 1)

    @property
    def is_known(self) -> bool:
        """Whether torch has the schedule."""
        return self.schedule.lower() in (*_SINGLE, *_SEVERAL, *_V_SHAPED)

    @property
    def allowed_per_rank(self) -> str:
        """How many stages of a rank the schedule takes, in words."""
        return "1" if self.schedule.lower() in _SINGLE else "2" if self.is_v_shaped else "2 or more"

    @property
    def has_its_stages(self) -> bool:
        """Whether each rank has as many stages as the schedule takes."""
        count = self.stages_per_rank or 0
        return count > 1 if self.allowed_per_rank == "2 or more" else str(count) == self.allowed_per_rank

    @property
    def is_v_shaped(self) -> bool:
        """Whether the first rank has the first and the last stage."""
        return self.schedule.lower() in _V_SHAPED

    @property
    def is_later(self) -> bool:
        """Whether weight gradients are computed apart from the gradients of activations."""
        return self.schedule.lower() in _LATER

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's stages, in ascending order."""
        if self.is_v_shaped:
            return rank, self.stages - 1 - rank
        return tuple(range(rank, self.stages, self.ranks))

    def layers(self, num_layers: int) -> list[range]:
        """Return the layers of each stage: those of `split`, or as many each, at most one more where they do not
        divide. ConfigError where there are fewer layers than stages, or the split is of another number."""
        check_layout_rules(Facts(stages=self, num_layers=num_layers))
        edges = [num_layers * stage // self.stages for stage in range(self.stages + 1)]
        if self.split:
            edges = [sum(self.split[:stage]) for stage in range(self.stages + 1)]
        return [range(begin, end) for begin, end in pairwise(edges)]


def stages_of(parallel: Any) -> StageLayout | None:
    """Return the pipeline stages of a table [parallel]; None where each rank has all layers."""
    ranks, per_rank = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    return None if ranks == 1 else StageLayout(ranks, parallel.pipeline_schedule, per_rank, parallel.pipeline_split)


def balanced_split(layers: Sequence[float], stages: int, last: float) -> tuple[int, ...]:
    """Return how many consecutive layers each stage has so that the stage which takes longest takes as little as it
    can. layers: what each takes; last: what the last stage takes beside its layers."""
    total = [0.0]
    for cost in layers:
        total.append(total[-1] + cost)
    # best[s][n]: of the first n layers in s stages, the longest stage and where the last of them begins
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        more = last if stage == stages else 0.0
        found = {}
        for end in range(stage, len(layers) - (stages - stage) + 1):
            choices = ((max(best[-1][b][0], total[end] - total[b] + more), -b) for b in best[-1] if b < end)
            longest, begin = min(choices)
            found[end] = longest, -begin
        best.append(found)
    edges = [len(layers)]
    for stage in range(stages, 0, -1):
        edges.append(best[stage][edges[-1]][1])
    return tuple(end - begin for begin, end in pairwise(reversed(edges)))
