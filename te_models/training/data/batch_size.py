"""How many windows a step reads, and at which position it begins, where the batch grows over the run (Megatron's
`rampup_batch_size`). Both follow from the number of the step alone, so that a resumed run repeats them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config import ConfigError

if TYPE_CHECKING:
    from ..config import TrainConfig

KEY = "data.rampup_batch_size"


@dataclass(frozen=True)
class BatchSize:
    """Windows of a step on all ranks together.

    windows: after the ramp. multiple: what each batch is a multiple of, the windows of one micro-batch on each rank
    that reads different data. ramp: (start, increment, samples): batches begin with `start` windows and grow by
    `increment` at equal distances, up to `windows` after `samples` windows; empty: every batch is the same.

    Raises ConfigError for a ramp that does not end at `windows`, and for batches that ranks cannot share.
    """

    windows: int
    multiple: int = 1
    ramp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ramp:
            return
        start, increment, _ = self.ramp
        if start >= self.windows or (self.windows - start) % increment:
            raise ConfigError(
                f"{KEY} is {list(self.ramp)}; allowed: a start below the {self.windows} windows of a step, which whole "
                "increments reach"
            )
        if start % self.multiple or increment % self.multiple:
            raise ConfigError(
                f"{KEY} is {list(self.ramp)}; allowed: a start and an increment that are multiples of {self.multiple}, "
                "the windows of one micro-batch on every rank"
            )

    def at(self, position: int) -> int:
        """Return the windows of the step that begins after `position` windows."""
        if not self.ramp or position >= self.ramp[2]:
            return self.windows
        start, increment, samples = self.ramp
        return start + increment * (position * ((self.windows - start) // increment) // samples)

    def micro_batches(self) -> list[int]:
        """Return how many micro-batches of each rank steps may have."""
        start, increment, _ = self.ramp or (self.windows, self.windows, 0)
        return [windows // self.multiple for windows in range(start, self.windows + 1, increment)]

    def position(self, steps: int) -> int:
        """Return how many windows the first `steps` steps read."""
        position = 0
        for done in range(steps):
            if not self.ramp or position >= self.ramp[2]:
                return position + (steps - done) * self.windows
            position += self.at(position)
        return position


def with_global_batch(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return a configuration whose `gradient_accumulation` makes `data.global_batch_size` on this many ranks that read
    different data; ConfigError where none does."""
    data = config.data
    if data.global_batch_size is None:
        return config
    multiple = data.micro_batch_size * ranks
    if data.global_batch_size % multiple:
        where = "data.global_batch_size"
        allowed = f"a multiple of {multiple}, the windows of one micro-batch on each of {ranks} ranks"
        raise ConfigError(f"{where} is {data.global_batch_size}; allowed: {allowed}", where)
    count = data.global_batch_size // multiple
    return config.replace(data=data.replace(gradient_accumulation=count, global_batch_size=None))


def batch_size(data: Any, ranks: int) -> BatchSize:
    """Return the batch of a run. data: its `DataConfig`; ranks: the ranks that read different data."""
    multiple = data.micro_batch_size * ranks
    return BatchSize(multiple * data.gradient_accumulation, multiple, tuple(data.rampup_batch_size))
