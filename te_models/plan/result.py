"""What a plan is asked for and what it says: the machines, and what a step takes of a rank. Without torch, which the
process that asks does not need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from ..config import ConfigError


@dataclass(frozen=True)
class Traffic:
    """calls: of a collective over a dimension of the mesh. payload: bytes of the whole tensors. sent: bytes that each
    rank sends when they go round in a ring."""

    calls: int = 0
    payload: int = 0
    sent: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.payload + other.payload, self.sent + other.sent)

    @classmethod
    def of(cls, kind: str, payload: float, ranks: float) -> Self:
        """Return the traffic of one collective of `ranks` ranks over tensors of `payload` bytes: all but a rank's own
        part of them goes round, twice where it is summed and handed back; what is sent to one rank goes there whole."""
        rounds = 1.0 if kind == "send" else (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
        return cls(1, round(payload), payload * rounds)

    def times(self, factor: float) -> Traffic:
        """Return the traffic of so many times as much work."""
        return Traffic(round(self.calls * factor), round(self.payload * factor), self.sent * factor)


Moved = dict[tuple[str, str], Traffic]
"""(collective, dimension of the mesh) -> what it moved."""


def added_traffic(a: Moved, b: Moved, factor: float = 1.0) -> Moved:
    """Return the traffic of `a` and of `factor` times as much work as that of `b`."""
    return {key: a.get(key, Traffic()) + b.get(key, Traffic()).times(factor) for key in sorted({*a, *b})}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a plan supposes of the machines; the defaults are an NVIDIA H100 SXM's data sheet, eight to a node.

    memory_gib: of a device. tflops, fp8_tflops: its dense peaks of bfloat16, and of FP8, which products under a recipe
    have. efficiency: the part of a peak that GEMMs reach. node_ranks: ranks that the fast links connect. node_gbps,
    network_gbps: gigabytes per second that a rank sends over the fast links, and over the network. host_gbps: that it
    copies to or from main memory.
    """

    memory_gib: float = 80.0
    tflops: float = 989.0
    fp8_tflops: float = 1979.0
    efficiency: float = 0.45
    node_ranks: int = 8
    node_gbps: float = 450.0
    network_gbps: float = 50.0
    host_gbps: float = 55.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 or (name == "efficiency" and value > 1):
                allowed = "a number above 0 and at most 1" if name == "efficiency" else "a positive number"
                raise ConfigError(f"{name} is {value}; allowed: {allowed}", name)


@dataclass(frozen=True)
class Stretch:
    """The steps of a run between two switches of its recipe. first_step: counted from 1; memory: bytes of a rank;
    step_s: seconds of a step."""

    recipe: str
    first_step: int
    steps: int
    memory: int
    step_s: float
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What one rank takes: of a pipeline, the memory of the rank that takes the most, and the traffic and time of the
    slowest. Bytes; FLOPs and seconds are of one optimizer step.
    stretches: of a run with a schedule of recipes, what each takes; the plan itself is of the one with the most memory.

    sizes: of the layout, by name, and whether it has sequence parallelism. options: its other choices, by the names of
    their keys in [parallel], and what is computed again, by those in [model]. parameters: as they are stored on this
    rank. optimizer: moments, masters and main gradients. activations: the most that a micro-batch takes beyond those,
    gradients and gathered parameters included. host: what is in main memory, where the run offloads. traffic:
    (collective, dimension of the mesh) -> `Traffic` of a step. compute_s, communication_s: of a step, with what a
    pipeline waits while it fills and empties (nothing under schedules that compute weight gradients meanwhile); step_s:
    communication of sharded parameters overlaps with compute, all other waits. waits: what a step consists of, in
    seconds by name, that add up to step_s. memory_limit, peak_flops: of a device.
    """

    sizes: dict[str, int | bool | str | None]
    ranks: int
    parameters: int
    optimizer: int
    activations: int
    tokens: int
    flops: float
    traffic: dict[tuple[str, str], Traffic]
    compute_s: float
    communication_s: float
    step_s: float
    waits: dict[str, float]
    memory_limit: float
    peak_flops: float
    host: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    stretches: tuple[Stretch, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes at the highest point of a step."""
        return self.parameters + self.optimizer + self.activations

    @property
    def tokens_per_second(self) -> float:
        """Tokens of each rank."""
        return self.tokens / self.step_s / self.ranks

    @property
    def fits(self) -> bool:
        """Whether that is no more than the device has."""
        return self.memory <= self.memory_limit

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the FLOPs of a step over what the device could do in that time."""
        return self.flops / self.step_s / self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        values = {k: v for k, v in asdict(self).items() if k != "traffic"}
        values["traffic"] = [
            {"collective": kind, "over": over, **asdict(traffic)} for (kind, over), traffic in self.traffic.items()
        ]
        values["stretches"] = list(values["stretches"])
        return values | {"memory": self.memory, "fits": self.fits, "mfu": self.mfu}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the plan that `to_dict` described."""
        known: dict[str, Any] = {its.name: values[its.name] for its in fields(cls)}
        rows = [dict(row) for row in known["traffic"]]
        known["traffic"] = {(row.pop("collective"), row.pop("over")): Traffic(**row) for row in rows}
        known["stretches"] = tuple(Stretch(**its) for its in known["stretches"])
        return cls(**known)
