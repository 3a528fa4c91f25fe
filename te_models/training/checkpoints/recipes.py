"""The live state of recipes in a checkpoint, and what a rank takes of it in the same layout or in another.

Every rank saves the state of the layers that it has. It is the same on all ranks that have the same layers and experts;
a layer of experts has the scales of a rank's consecutive experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from te_models.layers import Recipe, prepare_recipe_state, recipe_state
from te_models.layers.module.model_state import quantized_modules

from ...model import GPTModel
from ...parallel.dims import ParallelDims
from .checkpoint import TrainingState
from .checks import by_rank, check_ranges, check_same_layout


def complete_recipe_state(model: GPTModel, recipes: Iterable[Recipe]) -> dict[str, Tensor]:
    """Return the live state of the recipes that a model's steps have run under, of every layer that keeps any, whether
    it has run yet or not: so what a checkpoint must hold depends on its step alone."""
    for recipe in recipes:
        prepare_recipe_state(model, recipe)
    return live_state(model)


def live_state(model: GPTModel) -> dict[str, Tensor]:
    """Return a model's recipe state without the random bits of layers that draw none: those would be a name for each
    layer of each rank, and say no more than the run's seed."""
    found = recipe_state(model)
    for name, module in quantized_modules(model):
        key = f"{name}.fp8_rng_state"
        if key in found and not module.draws_random_bits:
            del found[key]
    return found


def saved_recipe_state(
    start: TrainingState, rank: int, now: ParallelDims | None, live: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the recipe state that a rank continues with, by name.

    now: the layout of the ranks; None: that of the checkpoint, repeated or cut off. live: the state of the rank's model
    now, complete (`complete_recipe_state`). A rank that is one more with its layers than before keeps its own random
    bits: names of `fp8_rng_state` are absent. Raises TrainingCheckpointError where the checkpoint has other names,
    shapes or dtypes than that, or values out of range.
    """
    before = ParallelDims.of(start.config.get("parallel") or {}, start.world_size)
    read = _reader(start)
    if now is None:
        known, saved_by = rank < start.world_size, rank % start.world_size
        found = read(saved_by)
    else:
        own, copies = rank % _each_stage(now), _each_stage(before)
        known, saved_by = own < copies, own % copies
        staged = max(before.pipeline_model_parallel_size, now.pipeline_model_parallel_size) > 1
        if _places(now) == _places(before):
            found = _of_all_stages(read, before, saved_by)
        else:
            found, saved_by = _moved(read, before, now, rank, live)
        found = {name: value for name, value in found.items() if name in live or not staged}
    found = {n: value for n, value in found.items() if n in live or not n.endswith("fp8_rng_state")}
    check_same_layout(found, {n: (tuple(t.shape), t.dtype) for n, t in live.items()}, f"recipe on rank {saved_by}")
    check_ranges(found)
    return {name: value for name, value in found.items() if known or not name.endswith("fp8_rng_state")}


def _reader(start: TrainingState) -> Callable[[int], dict[str, Tensor]]:
    """Return a function that returns what a rank of the run before saved."""
    if start.parts is None:
        states = by_rank(start.tensors, "recipe.")
        return lambda rank: states.get(str(rank), {})
    from .sharded.checkpoint import read_private

    return functools.cache(functools.partial(read_private, start.parts, "recipe"))


def _places(dims: ParallelDims) -> tuple[object, ...]:
    """Return what decides which experts, and which part of a layer, a rank of a stage has."""
    return dims.tensor_model_parallel_size, dims.expert_model_parallel_size, dims.expert_tensor_parallel_size


def _each_stage(dims: ParallelDims) -> int:
    """Return how many ranks have the same layers: consecutive ones."""
    return dims.ranks // dims.pipeline_model_parallel_size


def _of_all_stages(read: Callable[[int], dict[str, Tensor]], before: ParallelDims, number: int) -> dict[str, Tensor]:
    """Return the state of all layers of those ranks before that had this number among the ranks of their layers: a
    layer's state goes where the layer goes, whatever the schedule makes of stages."""
    found: dict[str, Tensor] = {}
    for stage in range(before.pipeline_model_parallel_size):
        found |= read(stage * _each_stage(before) + number)
    return found


def _split(dims: ParallelDims) -> int:
    """Return how many consecutive ranks have parts of the same experts."""
    assert dims.expert_tensor_parallel_size is not None, "filled in"
    return dims.expert_tensor_parallel_size


def _moved(
    read: Callable[[int], dict[str, Tensor]],
    before: ParallelDims,
    now: ParallelDims,
    rank: int,
    live: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], int]:
    """Return the state that a rank of another layout continues with, and the rank that most of it is from."""
    ep_before, ep_now = before.expert_model_parallel_size, now.expert_model_parallel_size
    own = rank // _split(now) % ep_now

    @functools.cache
    def of_experts(part: int) -> dict[str, Tensor]:
        return _of_all_stages(read, before, part * _split(before))

    found = dict(of_experts(own % ep_before))
    for name, value in found.items():
        wanted = live.get(name)
        if wanted is None or ep_now == ep_before or value.shape == wanted.shape or value.dim() == 0:
            continue
        parts = [of_experts(part).get(name, value[..., :0]) for part in range(ep_before)]
        whole, experts = torch.cat(parts, dim=-1), wanted.shape[-1]
        if whole.shape == (*wanted.shape[:-1], experts * ep_now):
            found[name] = whole.narrow(-1, own * experts, experts).clone()
    return found, own % ep_before * _split(before)
