"""How long a step takes at best: FLOPs over peaks, bytes over links, and which of them wait for each other.

Links inside a node and between nodes work side by side. Where experts are over several nodes, what goes to ranks of the
same node never leaves it; deep_ep sends a token once to each node that has one of its experts, and on from there.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.param_shapes import is_linear_weight

from ..config import ModelConfig
from ..model.flops import attention_share, forward_flops_per_token, shared_expert_share, weight_flops_per_token
from ..training.config import TrainConfig
from .result import Hardware, Moved, Traffic

if TYPE_CHECKING:
    from ..training.ranks.layout import RankLayout
    from .micro_batch import Recorded
    from .stretches import StretchRecipes

BEYOND = "gradients and sharded parameters, beyond compute"
"""The wait for what overlaps with compute, where it takes longer."""


def seconds_of(
    config: TrainConfig, model: ModelConfig, layout: RankLayout, moved: Moved, hardware: Hardware
) -> dict[tuple[str, str], float]:
    """Return how long each collective takes by itself, by its key in `moved`."""
    links = _Links(config, model, layout, hardware)
    return {key: links.seconds(*key, its) for key, its in moved.items()}


def waits_of(
    config: TrainConfig,
    model: ModelConfig,
    layout: RankLayout,
    found: Recorded,
    flops: float,
    hardware: Hardware,
    recipes: StretchRecipes,
) -> tuple[dict[str, float], float]:
    """Return the seconds of a step by what a rank waits for, and those that all collectives of the step take, one after
    the other. flops: of a rank's step.

    First comes compute, and behind it what a pipeline waits while it fills and empties.
    """
    micro_batches, stages = config.data.gradient_accumulation, layout.stages
    compute = compute_seconds(config, model, flops, hardware, recipes)
    waits = {"compute": compute}
    if stages is not None and not stages.is_later:  # while the pipeline fills and empties, a rank waits for the others
        waits[FILLS] = compute * (stages.ranks - 1) / (micro_batches * (stages.stages_per_rank or 1))
    seconds = seconds_of(config, model, layout, traffic_of(found, micro_batches), hardware)
    overlapped = {key for key in seconds if _overlaps(*key, config)}
    once = seconds_of(config, model, layout, found.once, hardware)
    at_end = sum(once[key] for key in overlapped & {*once})
    each = (sum(seconds[key] for key in overlapped) - at_end) / micro_batches
    compute = sum(waits.values())
    compute_each, last = compute / micro_batches, each + at_end
    if stages is not None:  # what stages send of parameters is not told by micro-batch
        compute_each, each = compute, 0.0
    waits[BEYOND] = max(0.0, each - compute_each) * (micro_batches - 1) + max(0.0, last - compute_each)
    ring = seconds.get(("send", "cp"), 0.0)  # while a rank attends to the keys that it has
    attending = waits["compute"] * attention_share(model, config.data.sequence_length)
    waits["send over cp, beyond attention"] = max(0.0, ring - attending)
    overlapped.add(("send", "cp"))
    waits |= {f"{kind} over {over}": s for (kind, over), s in seconds.items() if (kind, over) not in overlapped}
    travelling = "all_to_all over ep"
    if config.parallel.moe_shared_expert_overlap and travelling in waits:  # one direction of the two
        shared = compute * shared_expert_share(model, config.data.sequence_length)
        waits[travelling] -= min(waits[travelling] / 2, shared)
    if found.copied:
        waits[COPIES] = max(0.0, found.copied * micro_batches / hardware.host_gbps / 1e9 - compute)
    return waits, sum(seconds.values())


FILLS, COPIES = "pipeline fills and empties", "copies from and to main memory, beyond compute"


def traffic_of(found: Recorded, micro_batches: int) -> Moved:
    """Return the collectives of a whole step."""
    return {
        key: found.each.get(key, Traffic()).times(micro_batches) + found.once.get(key, Traffic())
        for key in sorted({*found.each, *found.once})
    }


def compute_seconds(
    config: TrainConfig, model: ModelConfig, flops: float, hardware: Hardware, recipes: StretchRecipes
) -> float:
    """Return the seconds of a step's products, those that are computed again included. Products of layers under a
    recipe take their time by the peak of FP8; attention, routers and the output layer by that of bfloat16."""
    again = 1 + recomputed_share(config, model) / 3  # a forward pass is a third
    in_fp8 = quantized_share(model, config.data.sequence_length, recipes)
    rate = (1 - in_fp8) / hardware.tflops + in_fp8 / hardware.fp8_tflops
    return again * flops * rate / 1e12 / hardware.efficiency


def recomputed_share(config: TrainConfig, model: ModelConfig) -> float:
    """Return the part of a forward pass's FLOPs that backward passes compute again."""
    source = config.model
    patterns = ("decoder", "mtp") if source.activation_checkpointing else source.recompute_modules
    return _share_of_modules(model, patterns, config.data.sequence_length) if patterns else 0.0


@lru_cache(maxsize=64)
def _share_of_modules(model: ModelConfig, patterns: tuple[str, ...], length: int) -> float:
    """Return the part of a forward pass's FLOPs that modules have whose names match one of the patterns. What mixers
    do beside their weights counts with these."""

    def matches(name: str) -> bool:
        words = name.split(".")
        return any(fnmatchcase(".".join(words[:end]), each) for end in range(1, len(words)) for each in patterns)

    names = expected_tensors(model, "grouped")
    again = {name for name in names if matches(name)}
    whole = forward_flops_per_token(model, length)
    of_layers = (name for name in filter(is_linear_weight, names) if name.startswith("decoder.layers."))
    mixers = [name for name in of_layers if ".mlp." not in name]
    attends = sum(name in again for name in mixers) / max(1, len(mixers)) * attention_share(model, length)
    return weight_flops_per_token(model, again.__contains__) / whole + attends


@lru_cache(maxsize=8)
def quantized_share(model: ModelConfig, length: int, recipes: StretchRecipes) -> float:
    """Return the part of a step's FLOPs that products under a recipe are: two thirds belong to gradients. length: of
    the texts."""
    if recipes.forward is None and recipes.gradients is None:
        return 0.0
    layers = [name for name in expected_tensors(model, "grouped") if name.startswith("decoder.")]
    share, parts = 0.0, (1 / 3, 2 / 3)
    recipes_of = {name: recipes.of_module(name.rpartition(".")[0]) for name in layers if is_linear_weight(name)}
    for number, part in enumerate(parts):
        quantized = {name for name, own in recipes_of.items() if own[number] is not None}
        share += part * weight_flops_per_token(model, lambda name, its=quantized: name in its)
    return share / forward_flops_per_token(model, length)


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


class _Links:
    """Seconds of collectives over the dimensions of a layout."""

    def __init__(self, config: TrainConfig, model: ModelConfig, layout: RankLayout, hardware: Hardware) -> None:
        self.config, self.model, self.dims, self.hardware = config, model, layout.dims, hardware

    def seconds(self, kind: str, dimension: str, moved: Traffic) -> float:
        """Return how long what a rank sends takes: in a ring over the dimension, by the slowest link of it."""
        hardware, dims = self.hardware, self.dims
        fast, slow = hardware.node_gbps * 1e9, hardware.network_gbps * 1e9
        tp, ep, etp = dims.tensor_model_parallel_size, dims.expert_model_parallel_size, dims.expert_tensor_parallel_size
        assert etp is not None, "filled in"
        reach = {"tp": tp, "cp": tp * dims.context_parallel_size, "etp": etp, "ep": etp * ep}.get(dimension, dims.ranks)
        if reach <= hardware.node_ranks:
            return moved.sent / fast
        if kind != "all_to_all" or ep == 1:
            return moved.sent / slow
        near = max(1, min(ep, hardware.node_ranks // etp))
        away = self._away(ep, near)
        return max(moved.sent * away / slow, moved.sent / fast if away < 1 else 0.0)

    def _away(self, ep: int, near: int) -> float:
        """Return the part of what a rank sends to experts that leaves its node. ep: the ranks that share them, `near`
        of which are in each node."""
        if ep <= near or ep % near:
            return 1.0
        nodes = ep // near
        if self.config.parallel.expert_dispatch != "deepep":
            return (ep - near) / (ep - 1)
        over_nodes = reached(self.model, nodes) * (nodes - 1) / nodes
        return over_nodes / (reached(self.model, ep, limited=False) * (ep - 1) / ep)


def reached(model: ModelConfig, parts: int, *, limited: bool = True) -> float:
    """Return among how many parts of the experts, of as many each, a token's lie on average. limited: the router's
    choice of groups counts, where parts are groups."""
    assert model.moe is not None
    experts, topk = model.moe.num_moe_experts, model.moe.moe_router_topk
    groups, chosen = model.moe.router.num_groups, model.moe.router.topk_groups
    if limited and groups and chosen and parts % groups == 0:
        experts, parts = experts * chosen // groups, parts * chosen // groups
    return parts * (1 - math.comb(experts - experts // parts, topk) / math.comb(experts, topk))
