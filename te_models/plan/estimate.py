"""The plan of a run: what each rank holds, computes and sends, whether it fits, and how long a step takes at best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from te_models.checkpoints import open_checkpoint

from ..config import ConfigError, ModelConfig
from ..training.build import read_model_config
from ..training.config import TrainConfig
from ..training.data.batch_size import with_global_batch
from ..training.preflight import check_run_layout
from ..training.ranks.data_parallel import Ranks
from ..training.ranks.layout import RankLayout, balanced, rank_layout
from ..training.trained import check_globs, step_flops_per_token
from .micro_batch import record_step
from .simulation import Traffic, fake_ranks, fake_tensors
from .stages import record_stages


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a plan supposes of the machines; the defaults are an NVIDIA H100 SXM's data sheet, eight to a node.

    memory_gib: of a device. tflops: its dense bfloat16 peak. efficiency: the part of it that GEMMs reach. node_ranks:
    ranks that the fast links connect. node_gbps, network_gbps: gigabytes per second that a rank sends over the fast
    links, and over the network.
    """

    memory_gib: float = 80.0
    tflops: float = 989.0
    efficiency: float = 0.45
    node_ranks: int = 8
    node_gbps: float = 450.0
    network_gbps: float = 50.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 or (name == "efficiency" and value > 1):
                allowed = "a number above 0 and at most 1" if name == "efficiency" else "a positive number"
                raise ConfigError(f"{name} is {value}; allowed: {allowed}", name)


@dataclass(frozen=True)
class Plan:
    """What one rank takes, the one that takes the most memory. Bytes; FLOPs and seconds are of one optimizer step.

    sizes: of the layout, by name, and whether it has sequence parallelism. parameters: as they are stored on this rank.
    optimizer: moments, masters and main gradients. activations: the most that a micro-batch takes beyond those,
    gradients and gathered parameters included. traffic: (collective, dimension of the mesh) -> `Traffic` of a step.
    compute_s, communication_s: of a step, with what a pipeline waits while it
    fills and empties (nothing under schedules that compute weight gradients meanwhile); step_s: communication of
    sharded parameters overlaps with compute, all other waits. waits: what a step consists of, in seconds by name, that
    add up to step_s. memory_limit, peak_flops: of a device.
    """

    sizes: dict[str, int | bool | None]
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

    @property
    def memory(self) -> int:
        """Bytes at the highest point of a step."""
        return self.parameters + self.optimizer + self.activations

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
        return values | {"memory": self.memory, "fits": self.fits, "mfu": self.mfu}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the plan that `to_dict` described."""
        known: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        rows = [dict(row) for row in known["traffic"]]
        known["traffic"] = {(row.pop("collective"), row.pop("over")): Traffic(**row) for row in rows}
        return cls(**known)


def model_of(config: TrainConfig) -> ModelConfig:
    """Return the configuration of the model that a run trains; of a folder nothing else is read."""
    if config.model.path is None:
        return read_model_config(config)
    with open_checkpoint(config.model.path, verify=False) as source:
        return source.config


def pipeline_ranks(config: TrainConfig) -> tuple[int, ...]:
    """Return the ranks of a pipeline of which one takes the most: the first (the most micro-batches in flight) and the
    last (the output layer)."""
    ranks = config.parallel.pipeline_model_parallel_size
    return (0,) if ranks == 1 else (0, ranks - 1)


def plan_here(config: TrainConfig, ranks: int, hardware: Hardware, pipeline_rank: int = 0) -> Plan:
    """Return the plan of a run on this many ranks, in a process that belongs to no process group and plans no other
    run: torch keeps meshes of equal shape, with the groups that they had.

    One micro-batch and the end of a step, of a pipeline all that its schedule does, run on tensors without values, as a
    rank of the layout would run them on CPU: the first of those that have the stages of `pipeline_rank`. Layers of a
    kind count as often as the model has them. Raises ConfigError for what `te-models train` refuses in this layout.
    """
    if config.parallel.cpu_offload:
        raise ConfigError("parallel.cpu_offload is True; allowed: False, because a plan is of the memory of devices")
    if config.posttraining.method == "distill":
        raise ConfigError("posttraining.method is 'distill'; allowed in a plan: others, because it counts no teacher")
    model, pipeline = model_of(config), config.parallel.pipeline_model_parallel_size
    rank = pipeline_rank * (ranks // pipeline)
    with fake_ranks(ranks, rank):
        layout = rank_layout(config.parallel, Ranks(rank, ranks), "cpu")
        config = with_global_batch(config, layout.data.world_size)
        check_run_layout(config, model, layout.dims)
        check_globs(config, model)
        layout = balanced(layout, config, model)
        with fake_tensors():
            found = (record_step if layout.stages is None else record_stages)(config, model, layout)
        dims, stages = layout.dims, layout.stages
    micro_batches = config.data.gradient_accumulation
    tokens = config.micro_batch_tokens * micro_batches
    traffic = {
        key: found.each.get(key, Traffic()).times(micro_batches) + found.once.get(key, Traffic())
        for key in sorted({*found.each, *found.once})
    }
    flops = step_flops_per_token(config, model) * tokens
    flops /= dims.tensor_model_parallel_size * dims.context_parallel_size * pipeline
    again = 4 / 3 if config.model.activation_checkpointing else 1.0  # the forward pass runs twice
    compute = again * flops / (hardware.tflops * 1e12 * hardware.efficiency)
    waits = {"compute": compute}
    if stages is not None and not stages.is_later:  # while the pipeline fills and empties, a rank waits for the others
        waits["pipeline fills and empties"] = (
            compute * (stages.ranks - 1) / (micro_batches * (stages.stages_per_rank or 1))
        )
    compute = sum(waits.values())
    seconds = {key: moved.sent / _bandwidth(key[1], layout, hardware) for key, moved in traffic.items()}
    overlapped = {key for key in traffic if _overlaps(*key, config)}
    at_end = {key: found.once[key].sent / _bandwidth(key[1], layout, hardware) for key in overlapped & {*found.once}}
    each = (sum(seconds[key] for key in overlapped) - sum(at_end.values())) / micro_batches
    compute_each, last = compute / micro_batches, each + sum(at_end.values())
    if stages is not None:  # what stages send of parameters is not told by micro-batch
        compute_each, each = compute, 0.0
    beyond = max(0.0, each - compute_each) * (micro_batches - 1) + max(0.0, last - compute_each)
    waits["gradients and sharded parameters, beyond compute"] = beyond
    waits |= {f"{kind} over {over}": s for (kind, over), s in seconds.items() if (kind, over) not in overlapped}
    return Plan(
        sizes={**dims.sizes(), "sequence_parallel": config.parallel.sequence_parallel},
        ranks=ranks,
        parameters=round(found.parameters),
        optimizer=round(found.optimizer),
        activations=round(found.peak - found.parameters - found.optimizer),
        tokens=tokens * dims.data_ranks,
        flops=flops,
        traffic=traffic,
        compute_s=compute,
        communication_s=sum(seconds.values()),
        step_s=sum(waits.values()),
        waits={name: s for name, s in waits.items() if s},
        memory_limit=hardware.memory_gib * 2**30,
        peak_flops=hardware.tflops * 1e12,
    )


_OVERLAPPED = ("dp", "dp_shard", "dp_shard_cp", "fsdp", "dp_replicate")
"""Dimensions whose collectives run while the layers compute."""


def _overlaps(kind: str, dimension: str, config: TrainConfig) -> bool:
    """Whether a collective runs while the layers compute; experts wait for their rows, whatever the ranks are called
    that share them. Whole gradients are summed while the last backward pass runs, unless it is one compiled graph, or
    that of a pipeline."""
    parallel = config.parallel
    at_once = config.compile and config.compile_mode == "whole"
    if parallel.data_parallel_shard_size == 1 and (at_once or parallel.pipeline_model_parallel_size > 1):
        return False
    return dimension in _OVERLAPPED and kind != "all_to_all"


def _bandwidth(dimension: str, layout: RankLayout, hardware: Hardware) -> float:
    """Return the bytes per second of a ring over a dimension: the fast links' where its ranks are in one node."""
    dims = layout.dims
    tp, ep = dims.tensor_model_parallel_size, dims.expert_model_parallel_size
    etp = dims.expert_tensor_parallel_size
    assert etp is not None, "filled in"
    reach = {"tp": tp, "cp": tp * dims.context_parallel_size, "etp": etp, "ep": etp * ep}.get(dimension, dims.ranks)
    return 1e9 * (hardware.node_gbps if reach <= hardware.node_ranks else hardware.network_gbps)
