"""Recipes' live state, saved by any layout under names of layers: scales go with experts, random bits with layers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.parallel.dims import ParallelDims
from te_models.training.checkpoints.checkpoint import TrainingState
from te_models.training.checkpoints.checks import TrainingCheckpointError
from te_models.training.checkpoints.recipes import LayerState, saved_recipe_state, whole_entries

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


def state_of(rank: int, dims: ParallelDims, layout: str = "") -> dict[str, LayerState]:
    """Layers have a scale and this rank's amax; experts' scales name the expert, streams the rank and the layer."""
    stages = dims.pipeline_model_parallel_size
    each = dims.ranks // stages
    stage, number = rank // each, rank % each
    own = list(range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages))
    found = {}
    for layer in V[stage] if "V" in layout else LOOP[stage] if "loop" in layout else own:
        found[f"layers.{layer}.qkv.fp8_scale"] = LayerState(torch.full((3, 1), 100.0 * layer + 50), False, False)
        amax = torch.tensor([1.0 + (number + layer) % each])
        found[f"layers.{layer}.qkv.fp8_grad_amax"] = LayerState(amax, False, True)
        stream = torch.tensor([1000 * layer + number, 7])
        found[f"layers.{layer}.qkv.fp8_rng_state"] = LayerState(stream, False, True)
        experts = torch.tensor([100.0 * layer + e + 1 for e in experts_of(rank, dims)]).expand(3, -1)
        divided = dims.expert_model_parallel_size > 1
        found[f"layers.{layer}.experts.fp8_scale"] = LayerState(experts.clone(), divided, divided)
        history = torch.stack([experts, experts / 2])
        found[f"layers.{layer}.experts.fp8_history"] = LayerState(history, divided, divided)
    return found


def saved_by(states: list[dict[str, LayerState]], dims: ParallelDims) -> dict[str, Tensor]:
    """What the ranks save, joined: stage after stage."""
    each = dims.ranks // dims.pipeline_model_parallel_size
    found: dict[str, Tensor] = {}
    for first in range(0, dims.ranks, each):
        stage = dict(enumerate(states[first : first + each]))
        gathered = {f"{n}.{name}": own.tensor for n, its in stage.items() for name, own in its.items()}
        one_stage = dims.of(dims.sizes() | {"pipeline_model_parallel_size": 1}, each)
        found |= whole_entries(states[first], gathered, one_stage)
    return found


def assert_continues(start: TrainingState, before: ParallelDims, rank: int, now: ParallelDims, layout: str) -> None:
    live = state_of(rank, now, layout)
    empty = {n: own._replace(tensor=torch.empty_like(own.tensor)) for n, own in live.items()}
    found = saved_recipe_state(start, rank, now, empty)
    each, had = (dims.ranks // dims.pipeline_model_parallel_size for dims in (now, before))
    known = rank % each < had
    assert found.keys() == {name for name in live if known or not name.endswith("rng_state")}, (layout, rank)
    for name, value in found.items():
        pending = name.endswith("grad_amax") and each != had
        expected = torch.tensor([float(had)]) if pending else live[name].tensor
        assert torch.equal(value, expected), (layout, rank, name)


@pytest.mark.parametrize("before", LAYOUTS)
def test_each_expert_keeps_its_scales_and_each_layer_its_stream_in_every_other_layout(before: str) -> None:
    ranks, sizes = LAYOUTS[before]
    dims = ParallelDims(ranks=ranks, **sizes)
    tensors = saved_by([state_of(rank, dims, before) for rank in range(ranks)], dims)
    assert not any(name.split(".")[1].isdigit() for name in tensors)
    start = TrainingState(1, 0, ranks, {"parallel": sizes}, tensors)
    for after, (ranks_now, sizes_now) in LAYOUTS.items():
        now = ParallelDims(ranks=ranks_now, **sizes_now)
        for rank in range(ranks_now):
            assert_continues(start, dims, rank, now, after)


@pytest.mark.parametrize("before", LAYOUTS)
def test_checkpoints_that_name_ranks_are_read(before: str) -> None:
    ranks, sizes = LAYOUTS[before]
    dims = ParallelDims(ranks=ranks, **sizes)
    states = [without_amaxes(state_of(rank, dims, before)) for rank in range(ranks)]
    tensors = {f"recipe.{rank}.{n}": own.tensor for rank, its in enumerate(states) for n, own in its.items()}
    start = TrainingState(1, 0, ranks, {"parallel": sizes}, tensors)
    for after, (ranks_now, sizes_now) in LAYOUTS.items():
        now = ParallelDims(ranks=ranks_now, **sizes_now)
        for rank in range(ranks_now):
            live = without_amaxes(state_of(rank, now, after))
            found = saved_recipe_state(start, rank, now, live)
            assert all(torch.equal(found[n], own.tensor) for n, own in live.items() if "rng" not in n), (after, rank)


def without_amaxes(state: Mapping[str, LayerState]) -> dict[str, LayerState]:
    return {name: own for name, own in state.items() if not name.endswith("grad_amax")}


def test_scales_that_ranks_do_not_share_stay_with_the_ranks() -> None:
    """As of `reduce_amax = False`."""
    dims = ParallelDims(ranks=2)
    states = [{"a.fp8_scale": LayerState(torch.full((3, 1), 1.0 + rank), False, True)} for rank in range(2)]
    start = TrainingState(1, 0, 2, {}, saved_by(states, dims))
    for ranks, rank, expected in ((2, 0, 1.0), (2, 1, 2.0), (1, 0, 1.0), (4, 3, 2.0)):
        found = saved_recipe_state(start, rank, ParallelDims(ranks=ranks), states[0])
        assert torch.equal(found["a.fp8_scale"], torch.full((3, 1), expected))


def test_a_checkpoint_that_lacks_experts_or_layers_is_refused() -> None:
    dims, now = ParallelDims(ranks=2, **EP2), ParallelDims(ranks=1)
    tensors = saved_by([state_of(rank, dims) for rank in range(2)], dims)
    start = TrainingState(1, 0, 2, {"parallel": EP2}, tensors)
    name = "layers.0.experts.fp8_scale"
    tensors[f"recipe.{name}"] = tensors[f"recipe.{name}"][..., :4]
    with pytest.raises(TrainingCheckpointError, match=rf"holds '{name}' with shape \[1, 3, 4\]; allowed: \[1, 3, 8\]"):
        saved_recipe_state(start, 0, now, state_of(0, now))
    moved = tensors.pop(f"recipe.{name}")
    with pytest.raises(TrainingCheckpointError, match=rf"the recipe lacks '{name}'"):
        saved_recipe_state(start, 0, now, state_of(0, now))
    tensors |= {f"recipe.{name}": moved, "recipe.layers.9.qkv.fp8_scale": torch.ones(3, 1)}
    with pytest.raises(TrainingCheckpointError, match=r"does not fit the model: it has 'layers.9.qkv.fp8_scale'"):
        saved_recipe_state(start, 0, now, state_of(0, now))
