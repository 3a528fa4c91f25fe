"""The live state of delayed scaling, saved by the ranks of one layout, is what the ranks of another continue with: each
expert's scales go where the expert is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.parallel.dims import ParallelDims
from te_models.training.checkpoints.checkpoint import TrainingState
from te_models.training.checkpoints.checks import TrainingCheckpointError
from te_models.training.checkpoints.recipes import saved_recipe_state

EXPERTS, LAYERS = 8, 4
EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SHARDED = {"data_parallel_shard_size": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, EP2),
    "ep4": (4, EP4),
    "tp2 ep4": (8, TP2 | EP4),
    "tp2 etp1 ep2": (2, TP2 | EP2 | {"expert_tensor_parallel_size": 1}),
    "etp2 ep2": (4, EP2 | {"expert_tensor_parallel_size": 2}),
    "pp2 ep2": (4, PP2 | EP2),
    "pp2 tp2 ep2": (8, PP2 | TP2 | EP2),
    "pp2 V": (2, PP2),
    "pp2 V ep2": (4, PP2 | EP2),
    "pp2 loop ep2": (4, PP2 | EP2),
    "ep2 fsdp4": (4, EP2 | SHARDED),
}
V, LOOP = [[0, 3], [1, 2]], [[0, 2], [1, 3]]
"""Layers of each of two ranks under schedules of two stages a rank."""


def experts_of(rank: int, dims: ParallelDims) -> range:
    """By the order of the dimensions of `ParallelMesh.experts`: pp, dp_replicate, fsdp, ep, and then tp or etp."""
    each = EXPERTS // dims.expert_model_parallel_size
    part = rank // dims.expert_tensor_parallel_size % dims.expert_model_parallel_size
    return range(part * each, (part + 1) * each)


def state_of(rank: int, dims: ParallelDims, layout: str = "") -> dict[str, Tensor]:
    """Every layer of the rank's stages has a scale of its own, and in its experts one for each that names it."""
    stages = dims.pipeline_model_parallel_size
    stage = rank // (dims.ranks // stages)
    own = list(range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages))
    found = {}
    for layer in V[stage] if "V" in layout else LOOP[stage] if "loop" in layout else own:
        found[f"layers.{layer}.qkv.fp8_scale"] = torch.full((3, 1), 100.0 * layer + 50)
        experts = torch.tensor([100.0 * layer + e + 1 for e in experts_of(rank, dims)])
        found[f"layers.{layer}.experts.fp8_scale"] = experts.expand(3, -1).clone()
        found[f"layers.{layer}.experts.fp8_history"] = torch.stack([experts.expand(3, -1), experts.expand(3, -1) / 2])
    return found


@pytest.mark.parametrize("before", LAYOUTS)
def test_each_expert_keeps_its_scales_in_every_other_layout(before: str) -> None:
    ranks, sizes = LAYOUTS[before]
    dims = ParallelDims(ranks=ranks, **sizes)
    tensors = {f"recipe.{rank}.{n}": t for rank in range(ranks) for n, t in state_of(rank, dims, before).items()}
    start = TrainingState(1, 0, ranks, {"parallel": sizes}, tensors)
    for after, (ranks_now, sizes_now) in LAYOUTS.items():
        now = ParallelDims(ranks=ranks_now, **sizes_now)
        for rank in range(ranks_now):
            live = state_of(rank, now, after)
            found = saved_recipe_state(start, rank, now, {n: torch.empty_like(t) for n, t in live.items()})
            assert found.keys() == live.keys(), (after, rank)
            assert all(torch.equal(found[name], live[name]) for name in live), (after, rank)


def test_a_rank_that_lacks_experts_is_refused() -> None:
    dims, now = ParallelDims(ranks=2, **EP2), ParallelDims(ranks=1)
    tensors = {f"recipe.{rank}.{n}": t for rank in range(2) for n, t in state_of(rank, dims).items()}
    del tensors["recipe.1.layers.0.experts.fp8_scale"]
    with pytest.raises(
        TrainingCheckpointError, match=r"holds 'layers.0.experts.fp8_scale' as float32 \[3, 4\]; allowed"
    ):
        saved_recipe_state(TrainingState(1, 0, 2, {"parallel": EP2}, tensors), 0, now, state_of(0, now))
