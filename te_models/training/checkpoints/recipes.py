"""The live state of recipes in a checkpoint, and what a rank takes of it in the same layout or in another.

It has the name of the layer that it belongs to: `recipe.LAYER.NAME`, whichever rank or pipeline stage has the layer.
Scales and histories are the layer's, and of distributed experts each expert's. What ranks that have the same layer do
not share is in as many rows: the stream of each rank's random bits, the amaxes that it has recorded since the last
update of scales, and scales that no rank shares: of experts with several copies, and of `reduce_amax = False`.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.checkpoints.io.errors import quote, shorten
from te_models.layers import DelayedScaling, Recipe, prepare_recipe_state, recipe_state
from te_models.layers.module.model_state import quantized_modules
from te_models.layers.recipe.recipe_use import recipe_for_layer

from ...model import GPTModel
from ...parallel.dims import ParallelDims
from ...parallel.parts import LocalPart
from .checkpoint import TrainingState
from .checks import PARTS, TrainingCheckpointError, check_ranges
from .old_recipes import each_stage, expert_split, old_recipe_state

PREFIX = "recipe."
_STREAM, _PENDING = "fp8_rng_state", ("fp8_amax", "fp8_grad_amax", "fp8_outer_amax")


class LayerState(NamedTuple):
    """An entry of a layer's state. tensor: this rank's. per_expert: its last dimension counts the experts of a layer
    whose experts are distributed. per_rank: ranks that have the same layer have different ones."""

    tensor: Tensor
    per_expert: bool
    per_rank: bool

    def rows(self, dims: ParallelDims, rank: int) -> tuple[int, int]:
        """Return how many ranks have the entry, and the number of this rank among them."""
        count, own = each_stage(dims), rank % each_stage(dims)
        if not self.per_expert:
            return count, own
        split, experts = expert_split(dims), dims.expert_model_parallel_size
        return count // experts, own // (split * experts) * split + own % split

    def part(self, dims: ParallelDims, rank: int, rows: int | None = None, of: range | None = None) -> LocalPart:
        """Return the rank's part of the whole entry, as it is saved. rows: of a checkpoint, whose rows `of` it is;
        None: as in this layout; 0: it has no rows."""
        count, own = self.rows(dims, rank)
        if rows is None:
            rows, of = (count, range(own, own + 1)) if self.per_rank else (0, None)
        tensor, shape, cuts = self.tensor, list(self.tensor.shape), {}
        if self.per_expert:
            each = shape[-1]
            first = rank // expert_split(dims) % dims.expert_model_parallel_size * each
            shape[-1] = each * dims.expert_model_parallel_size
            cuts[len(shape) - 1] = ((first, first + each),)
        if rows:
            assert of is not None, "which of them"
            tensor, shape = tensor.expand(len(of), *tensor.shape), [rows, *shape]
            cuts = {0: ((of.start, of.stop),)} | {dim + 1: its for dim, its in cuts.items()}
        return LocalPart(tensor, tuple(shape), cuts)


def complete_recipe_state(model: GPTModel, recipes: Iterable[Recipe]) -> dict[str, LayerState]:
    """Return the live state of the recipes that a model's steps have run under, of every layer that keeps any, whether
    it has run yet or not: so what a checkpoint must hold depends on its step alone. Layers that draw no random bits
    have no stream: that says no more than the run's seed."""
    recipes = list(recipes)
    for recipe in recipes:
        prepare_recipe_state(model, recipe)
    state, found = recipe_state(model), {}
    for name, module in quantized_modules(model):
        of_module = (recipe_for_layer(recipe, module)[0] for recipe in recipes)
        alone = any(isinstance(own, DelayedScaling) and not own.reduce_amax for own in of_module)
        for key in module.recipe_state():
            if key == _STREAM and not module.draws_random_bits:
                continue
            per_expert = not module.reduce_amax and key.startswith(("fp8_scale", "fp8_history", "fp8_amax", "fp8_grad"))
            per_rank = alone or not module.reduce_amax or key in (_STREAM, *_PENDING)
            full = f"{name}.{key}" if name else key
            found[full] = LayerState(state[full], per_expert, per_rank)
    return found


def whole_entries(
    state: Mapping[str, LayerState], gathered: Mapping[str, Tensor], dims: ParallelDims
) -> dict[str, Tensor]:
    """Return the entries of all ranks, whole, by the names that they have in checkpoints. gathered: `{rank}.{name}` ->
    the tensor of a rank."""
    found = {}
    for name, own in state.items():
        whole = torch.empty(own.part(dims, 0).shape, dtype=own.tensor.dtype, device="cpu")
        for rank in range(dims.ranks):
            part = own._replace(tensor=gathered[f"{rank}.{name}"]).part(dims, rank)
            for box in part.boxes():
                area = tuple(slice(begin, begin + size) for begin, size in zip(box.begin, box.shape, strict=True))
                whole[area] = part.view(box)
        found[PREFIX + name] = whole
    return found


def saved_recipe_state(
    start: TrainingState, rank: int, now: ParallelDims, live: Mapping[str, LayerState]
) -> dict[str, Tensor]:
    """Return the recipe state that a rank continues with, by name.

    now: the layout of the ranks. live: the state of the rank's model now (`complete_recipe_state`). A rank that is one
    more with its layers than before keeps its own random bits: names of `fp8_rng_state` are absent. Amaxes that ranks
    of another layout have recorded count as the largest of them, as in an update. Raises TrainingCheckpointError where
    the checkpoint has other names, shapes or dtypes than that, or values out of range.
    """
    saved = _saved(start)
    if any(name.partition(".")[0].isdigit() for name in saved):
        return old_recipe_state(start, rank, now, {name: own.tensor for name, own in live.items()})
    staged = now.pipeline_model_parallel_size > 1
    missing = [name for name in live if name not in saved]
    unknown = [n for n in saved if n not in live and not staged and not n.endswith(_STREAM)]
    for words, names in (("lacks", missing), ("does not fit the model: it has", unknown)):
        if names:
            raise TrainingCheckpointError(f"the state of the recipe {words} {shorten(names, 2)}")
    before = ParallelDims.of(start.config.get("parallel") or {}, start.world_size)
    parts, unshared = {}, set()
    for name, own in live.items():
        shape, (count, row), of = saved[name], own.rows(now, rank), None
        rows = _saved_rows(own, shape, before, now)
        if rows:
            of = range(row % rows, row % rows + 1)
            if name.endswith(_PENDING) and rows != count:
                of = range(rows)
            if row >= rows:
                unshared.add(name)
        part = own._replace(tensor=torch.empty_like(own.tensor)).part(now, rank, rows, of)
        parts[name] = LocalPart(part.tensor.contiguous(), part.shape, part.cuts)
        if shape != part.shape:
            raise TrainingCheckpointError(
                f"the state of the recipe holds {quote(name)} with shape {list(shape)}; allowed: {list(part.shape)}"
            )
    _fill(start, parts)
    found = {n: p.tensor.amax(0) if p.tensor.dim() > live[n].tensor.dim() else p.tensor for n, p in parts.items()}
    check_ranges(found)
    return {name: value for name, value in found.items() if name not in unshared or not name.endswith(_STREAM)}


def _saved_rows(own: LayerState, shape: tuple[int, ...], before: ParallelDims, now: ParallelDims) -> int:
    """Return how many rows an entry must have as it was saved; 0: it is in one piece. Whether ranks share scales of
    experts depends on how these were distributed."""
    distributed = before.expert_model_parallel_size
    if distributed == now.expert_model_parallel_size:
        return own.rows(before, 0)[0] if own.per_rank else 0
    copies = each_stage(before)
    with_rows = len(shape) == own.tensor.dim() + 1 and shape[0] in (copies, copies // distributed)
    return shape[0] if with_rows else 0


def _saved(start: TrainingState) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a checkpoint holds of recipes, by name."""
    tensors: Mapping[str, object] = start.tensors
    if start.parts is not None:
        from .sharded.index import read_parts_index

        tensors = read_parts_index(start.parts / PARTS).tensors
    return {n.removeprefix(PREFIX): tuple(t.shape) for n, t in tensors.items() if n.startswith(PREFIX)}  # type: ignore[attr-defined]


def _fill(start: TrainingState, parts: Mapping[str, LocalPart]) -> None:
    if start.parts is not None:
        from .sharded.checkpoint import load_parts

        load_parts(start.parts, {PREFIX + name: part for name, part in parts.items()})
        return
    for name, part in parts.items():
        stored = start.tensors[PREFIX + name]
        if stored.dtype != part.tensor.dtype:
            raise TrainingCheckpointError(
                f"the state of the recipe holds {quote(name)} as {stored.dtype}; allowed: {part.tensor.dtype}"
            )
        part.tensor.copy_(part.of_whole(stored))
