"""Which sizes of a run fit into a machine's memory: a few plans say how memory grows, and one more says what is taken.

Memory is what stays (parameters, moments, gradients) and what a micro-batch adds in proportion to its tokens. Plans of
one window, of two, and of one with checkpointing tell the parts; what fits by them is planned itself before it is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..config import ConfigError
from ..plan import Hardware, Plan
from ..plan.process import plan_each
from ..sizes import format_size
from ..training.config import TrainConfig

WINDOWS = 16
"""Windows of a step: micro_batch_size times gradient_accumulation."""
SHORTEST = 128
"""Tokens of the shortest window that is tried."""
MOST_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Of a micro-batch: with more a device is no faster."""
_BYTES = {"float32": 8.0, "bfloat16": 4.0, "float8": 2.07}
"""Of the two moments of a parameter, scales included."""


@dataclass(frozen=True)
class RunSizes:
    """What is decided by memory. memory: bytes that the plan says."""

    sequence_length: int
    micro_batch_size: int = 1
    checkpointing: bool = False
    moments: str = "float32"
    memory: float = 0.0

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the keys, by table."""
        return {
            "data": {
                "sequence_length": self.sequence_length,
                "micro_batch_size": self.micro_batch_size,
                "gradient_accumulation": WINDOWS // self.micro_batch_size,
            },
            "model": {"activation_checkpointing": self.checkpointing},
            "optimizer": {"moment_dtype": self.moments},
        }


@dataclass(frozen=True)
class Growth:
    """How a run's memory grows. steady: bytes that stay, without moments; moments: parameters that have moments;
    window: bytes of a window of `length` tokens, without and with checkpointing."""

    steady: float
    moments: float
    window: dict[bool, float]
    length: int

    @classmethod
    def of(cls, one: Plan, two: Plan, again: Plan, length: int, trained: int) -> Growth:
        """Read it off plans of one window, of two, and of one with checkpointing."""
        window = max(two.activations - one.activations, 0)
        fixed = max(one.activations - window, 0)
        steady = one.parameters + one.optimizer - _BYTES["float32"] * trained + fixed
        return cls(steady, trained, {False: window, True: max(again.activations - fixed, 0)}, length)

    def memory(self, sizes: RunSizes) -> float:
        """Return the bytes that sizes take."""
        windows = sizes.micro_batch_size * sizes.sequence_length / self.length
        return self.steady + _BYTES[sizes.moments] * self.moments + windows * self.window[sizes.checkpointing]


def first_fitting_sizes(
    config_of: Callable[[RunSizes], TrainConfig],
    length: int,
    trained: int,
    device: str,
    budget: int,
    *,
    largest: int = WINDOWS,
) -> RunSizes:
    """Return the first sizes that fit, of those that cost least first.

    Args:
        config_of: Makes the configuration to plan of sizes.
        length: Tokens of a window, where they fit.
        trained: Parameters that have moments.
        budget: Bytes that a run may take.
        largest: Windows of the largest micro-batch, a power of two.

    Raises ConfigError where none fit.
    """
    hardware = Hardware(memory_gib=budget / 2**30)
    first = RunSizes(length)
    points = [first, replace(first, micro_batch_size=2), replace(first, checkpointing=True)]
    plans = plan_each([config_of(point) for point in points], 1, hardware)
    planned: list[Plan] = []
    for plan in plans:
        if isinstance(plan, ConfigError):
            raise plan
        planned.append(plan)
    one, two, checkpointed = planned
    growth = Growth.of(one, two, checkpointed, length, trained)
    smallest = 0.0
    for tried in _cheapest_first(length, MOST_TOKENS[device], largest, bool(trained)):
        smallest = growth.memory(tried)
        if smallest > budget:
            continue
        (plan,) = plan_each([config_of(tried)], 1, hardware)
        if isinstance(plan, ConfigError):
            raise plan
        if plan.fits:
            return replace(tried, memory=plan.memory)
    raise ConfigError(
        f"the smallest run of this task takes {format_size(smallest)}, and may take {format_size(budget)} of this "
        "machine's memory; allowed: a smaller model, or --task lora or qlora, or several ranks (te-models plan)"
    )


def _cheapest_first(length: int, most_tokens: int, largest: int, moments: bool) -> Iterator[RunSizes]:
    """Yield sizes: float32 moments before shorter ones, all activations before fewer, long windows before short ones,
    and of each the largest micro-batch first."""
    while length >= min(SHORTEST, length):
        for checkpointing, kind in ((False, "float32"), (False, "bfloat16"), (True, "bfloat16"), (True, "float8")):
            if not moments and kind != ("bfloat16" if checkpointing else "float32"):
                continue  # adapters are small: their moments decide nothing
            size = largest
            while size >= 1:
                if size == 1 or size * length <= most_tokens:
                    yield RunSizes(length, size, checkpointing, kind if moments else "float32")
                size //= 2
        if length // 2 < SHORTEST:
            return
        length //= 2
