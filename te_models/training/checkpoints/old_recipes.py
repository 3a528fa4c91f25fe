"""The live state of recipes in checkpoints of earlier releases. Its name had the rank that wrote it:
`recipe.RANK.NAME`. Every rank saved the state of the layers and the experts that it had."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...parallel.dims import ParallelDims
from .checkpoint import TrainingState
from .checks import by_rank, check_ranges, check_same_layout


def old_recipe_state(
    start: TrainingState, rank: int, now: ParallelDims, live: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what `saved_recipe_state` does. live: the state of the rank's model now, by name."""
    before = ParallelDims.of(start.config.get("parallel") or {}, start.world_size)
    read = _reader(start)
    own, copies = rank % each_stage(now), each_stage(before)
    saved_by = own % copies
    staged = max(before.pipeline_model_parallel_size, now.pipeline_model_parallel_size) > 1
    if _places(now) == _places(before):
        found = _of_all_stages(read, before, saved_by)
    else:
        found, saved_by = _moved(read, before, now, rank, live)
    found = {name: value for name, value in found.items() if name in live or not staged}
    found = {n: value for n, value in found.items() if n in live or not n.endswith("fp8_rng_state")}
    check_same_layout(found, {n: (tuple(t.shape), t.dtype) for n, t in live.items()}, f"recipe on rank {saved_by}")
    check_ranges(found)
    return {name: value for name, value in found.items() if own < copies or not name.endswith("fp8_rng_state")}


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


def each_stage(dims: ParallelDims) -> int:
    """Return how many ranks have the same layers: consecutive ones."""
    return dims.ranks // dims.pipeline_model_parallel_size


def _of_all_stages(read: Callable[[int], dict[str, Tensor]], before: ParallelDims, number: int) -> dict[str, Tensor]:
    """Return the state of all layers of those ranks before that had this number among the ranks of their layers: a
    layer's state goes where the layer goes, whatever the schedule makes of stages."""
    found: dict[str, Tensor] = {}
    for stage in range(before.pipeline_model_parallel_size):
        found |= read(stage * each_stage(before) + number)
    return found


def expert_split(dims: ParallelDims) -> int:
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
    own = rank // expert_split(now) % ep_now

    @functools.cache
    def of_experts(part: int) -> dict[str, Tensor]:
        return _of_all_stages(read, before, part * expert_split(before))

    found = dict(of_experts(own % ep_before))
    for name, value in found.items():
        wanted = live.get(name)
        if wanted is None or ep_now == ep_before or value.shape == wanted.shape or value.dim() == 0:
            continue
        parts = [of_experts(part).get(name, value[..., :0]) for part in range(ep_before)]
        whole, experts = torch.cat(parts, dim=-1), wanted.shape[-1]
        if whole.shape == (*wanted.shape[:-1], experts * ep_now):
            found[name] = whole.narrow(-1, own * experts, experts).clone()
    return found, own % ep_before * expert_split(before)
