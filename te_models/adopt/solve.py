"""The model of one configuration: which elements and names give transformers' tensors and logits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.names import Fused, Names
from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.param_shapes import expected_tensors
from te_models.checkpoints.mapping.plan import make_plan
from te_models.checkpoints.mapping.stream import carry_out
from te_models.checkpoints.mapping.te_namespace import te_namespace

from ..config import ConfigError, ModelConfig
from ..model import GPTModel
from .naming import Found, key_of, solve
from .pool import Pool, from_paths
from .probe import Built, tokens
from .toggles import derived_numbers, options

TOLERANCE = 1e-5
Paths = dict[str, Any]
STAGES: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    ("both", (1, 4), ("norm.", "embedding.", "block")),
    ("attention", (1, 4), ("mlp.", "moe.", "residual_multiplier", "block", "layer_scalar", "embedding.multiplier")),
    ("mlp", (1,), ("attention.", "block")),
    ("mlp", (1, 4), ("attention.", "rope.", "embedding.position", "embedding.multiplier")),
    ("mlp", (1, 4, 23), ("attention.", "rope.", "embedding.position", "layer_types")),
    ("", (1, 4, 23), ("",)),
)
"""What adds nothing, lengths of rows, and what begins the elements that are in question."""


@dataclass(frozen=True)
class SolverState:
    """A model under way: paths of ModelConfig with their values, and the weight map."""

    paths: Paths
    names: Names
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a family's `mixers` say beside them."""
    elements: tuple[Paths, ...] = ()
    """What other families say of the fields that this one does not know."""
    keeps_dtype: tuple[str, ...] = ("*.router.expert_bias",)

    def config(self) -> ModelConfig:
        return from_paths({**self.paths, **self.extra})

    def with_paths(self, changes: Mapping[str, Any]) -> SolverState:
        """Return the state with these paths; None takes a part away with all that is said of it."""
        gone = tuple(f"{path}." for path, value in changes.items() if value is None)
        left = {path: value for path, value in self.paths.items() if not gone or not path.startswith(gone)}
        return replace(self, paths={**left, **changes})


def solved_weights(config: ModelConfig, names: Names, tensors: Mapping[str, Tensor], unused: Iterable[str] = ()) -> Any:
    """Return our tensors of files' ones; CheckpointError where they are not exactly the model's."""
    namespace = Family("candidate", "", (), names=names).namespace(config)
    store = MemoryStore(dict(tensors))
    copies = {copy for copy, original in names.copies(config) if copy in tensors and original in tensors}
    plan = make_plan(
        store.tensors,
        namespace,
        te_namespace(config, "grouped"),
        where="the state dict",
        unused={*unused, *copies},
        passthrough={},
    )
    return carry_out(plan, store)


@functools.lru_cache(maxsize=8)
def _empty_model(config: ModelConfig) -> GPTModel:
    """Return our model without weights: many candidates differ in their names alone, many moved fields in nothing."""
    model = GPTModel(config, device="meta")
    model.to_empty(device="cpu")
    return model.eval()


@functools.lru_cache(maxsize=256)
def tensors_needed(config: ModelConfig) -> Any:
    """Return the tensors of our model of a configuration."""
    return expected_tensors(config)


@torch.no_grad()
def our_logits(
    config: ModelConfig, weights: Mapping[str, Tensor], lengths: Iterable[int], seed: int = 0
) -> dict[int, Tensor]:
    """Return the logits of our model with these weights."""
    model = _empty_model(config)
    for name, tensor in model.stored_tensors():
        tensor.copy_(weights[name])
    return {n: model(tokens(n, config.vocab_size, seed)).logits for n in lengths}


def difference(got: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> float:
    """Return the largest difference over the largest logit, of all lengths that both have; inf where one is not
    finite or of another shape."""
    worst = 0.0
    for n, mine in got.items():
        theirs = expected[n]
        if mine.shape != theirs.shape or not bool(mine.isfinite().all()):
            return math.inf
        worst = max(worst, ((mine - theirs).abs().max() / theirs.abs().max()).item())
    return worst


def error_of(
    state: SolverState, tensors: Mapping[str, Tensor], expected: Mapping[int, Tensor], lengths: Iterable[int]
) -> float:
    """Return how far the logits of a candidate are from transformers'; inf where it does not fit."""
    try:
        config = state.config()
        weights = solved_weights(config, state.names, tensors)
        return difference(our_logits(config, weights, lengths), expected)
    except (CheckpointError, ConfigError, ValueError, RuntimeError, AssertionError, TypeError, KeyError, IndexError):
        return math.inf


def structure(
    state: SolverState, shapes: Mapping[str, tuple[int, ...]], pool: Pool, near: Names, values: Mapping[str, Any]
) -> tuple[SolverState, Found] | None:
    """Return the state with elements turned on or off until its tensors are those of the files as nearly as can be."""
    try:
        config = state.config()
    except ConfigError:
        return None
    solved = solve(config, shapes, pool, near)
    layers = layers_with_experts(shapes)
    if config.moe is not None and layers and list(config.moe.layers or ()) != layers:
        with contextlib.suppress(ConfigError):
            mixed = state.with_paths({"moe.layers": layers})
            other = solve(mixed.config(), shapes, pool, near)
            if other and (not solved or other[0][0].cost < solved[0][0].cost):
                state, config, solved = mixed, mixed.config(), other
    best = solved[0][0] if solved else None
    keys = {key for _, key in solved[:3]} if solved else None
    while best is None or best.cost:
        improved: tuple[int, SolverState, Found] | None = None
        for changes in _changes(state, derived_numbers(values)):
            tried = state.with_paths(changes)
            try:
                other_config = tried.config()
            except ConfigError:
                continue
            same = tensors_needed(other_config) == tensors_needed(config) and other_config.block == config.block
            found = [] if same and best is not None else solve(other_config, shapes, pool, near, keys)
            least = improved[0] if improved else len(shapes) * 9 if best is None else best.cost
            if found and found[0][0].cost < least:
                improved = found[0][0].cost, tried, found[0][0]
        if improved is None:
            break
        _, state, best = improved
        config = state.config()
    return None if best is None else (replace(state, names=best.names), best)


_WHOLE = (
    "moe.shared_expert_intermediate_size",
    "attention.kv_channels",
    "attention.num_query_groups",
    "embedding.position_offset",
)
"""Numbers of ours that may be a whole number of theirs."""


def layers_with_experts(shapes: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the layers that have experts, by the names of their tensors."""
    found = (re.search(r"\.(\d+)\..*(?<!shared_)experts?\b", name) for name in shapes)
    return sorted({int(match[1]) for match in found if match})


_TOGETHER: tuple[Paths, ...] = (
    {"norm.normalization": "LayerNorm", "norm.bias": True},
    {"norm.normalization": "LayerNorm", "norm.has_weight": False},
    {"norm.normalization": "RMSNorm", "norm.bias": False},
    {"mlp.gated": False, "mlp.bias": True},
    {"attention.output_gate": True, "attention.output_gate_by": "head"},
    {"attention.qk_layernorm": "head", "attention.qk_layernorm_bias": True},
    {"attention.add_qkv_bias": True, "attention.add_output_bias": True, "mlp.bias": True},
)
"""Elements that are valid, or usual, only together."""


def _changes(state: SolverState, numbers: Mapping[str, float], prefixes: tuple[str, ...] = ("",)) -> Iterator[Paths]:
    """Yield every change of one element, and of some that belong together."""
    try:
        current = state.config().to_dict()
    except ConfigError:
        current = {}
    for element in state.elements:
        if any(path.startswith(prefixes) for path in element):
            yield element
    for path, values in options(numbers):
        if not path.startswith(prefixes) or (path.startswith("moe.") and current.get("moe") is None):
            continue
        for value in values:
            if _at(current, path) != value:
                yield {path: value}
    whole = {int(n) for how, n in numbers.items() if how.endswith(":") and n == int(n)}
    for path in _WHOLE:
        if path.startswith(prefixes) and (current.get("moe") is not None or not path.startswith("moe.")):
            for value in (None, *whole, *({1} - whole if path == "attention.num_query_groups" else ())):
                if value != _at(current, path) and (value is not None or "offset" not in path):
                    yield {path: value}
    for part in ("attention.indexer", "attention.mla", "moe", "hyper_connections"):
        if part.startswith(prefixes) and _at(current, part) is not None:
            yield {part: None}
    for changes in _TOGETHER:
        if any(path.startswith(prefixes) for path in changes):
            yield changes


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _other_names(names: Names) -> Iterator[Names]:
    """Yield weight maps with the same tensors in another order."""
    if len(names.qkv) == 1:
        yield replace(names, heads_in_turn=not names.heads_in_turn)
        yield replace(names, qkv_blocks=None if names.qkv_blocks else 4)
    yield replace(names, halves_swapped=not names.halves_swapped)
    yield replace(names, embedding=names.output, output=names.embedding)
    if isinstance(names.experts, Fused):
        yield replace(names, experts=replace(names.experts, interleaved=not names.experts.interleaved))
    if len(names.fc1) == 2:
        yield replace(names, fc1=names.fc1[::-1])
    present = [slot for slot, norm in enumerate(names.norms) if norm]
    for order in itertools.permutations(present):
        if list(order) != present and len(present) > 1:
            norms: list[str | None] = [None] * 4
            for slot, other in zip(present, order):
                norms[slot] = names.norms[other]
            yield replace(names, norms=tuple(norms))


def _alternatives(
    state: SolverState,
    shapes: Mapping[str, tuple[int, ...]],
    pool: Pool,
    prefixes: tuple[str, ...],
    numbers: Mapping[str, float],
) -> Iterator[SolverState]:
    """Yield states that differ in one element, or in the order of what tensors hold."""
    for names in _other_names(state.names):
        yield replace(state, names=names)
    config = state.config()
    for changes in _changes(state, numbers, prefixes):
        tried = state.with_paths(changes)
        try:
            other = tried.config()
        except ConfigError:
            continue
        if other == config:
            continue
        if tensors_needed(other) != tensors_needed(config) or other.block != config.block:
            found = solve(other, shapes, pool, state.names, {key_of(state.names, other)})
            if not found or found[0][0].cost:
                continue
            tried = replace(tried, names=ordered_as(found[0][0].names, state.names))
        yield tried


def ordered_as(names: Names, before: Names) -> Names:
    """Return a weight map with what is in the same order as `before` where both have the same names."""
    orders = ("fc1", "shared_fc1", "qk_norms", "norms"), ("embedding", "output")
    its = {part: getattr(before, part) for part in (*orders[0], *orders[1])}
    same = {
        p: v for p, v in its.items() if p in orders[0] and sorted(map(str, getattr(names, p))) == sorted(map(str, v))
    }
    if {names.embedding, names.output} == {before.embedding, before.output}:
        same |= {p: its[p] for p in orders[1]}
    if isinstance(names.experts, Fused) and isinstance(before.experts, Fused):
        same["experts"] = replace(names.experts, interleaved=before.experts.interleaved)
    like = ("halves_swapped", *(("heads_in_turn", "qkv_blocks") if len(names.qkv) == 1 else ()))
    return replace(names, **same, **{p: getattr(before, p) for p in like})


def search(
    state: SolverState, built: Built, pool: Pool, values: Mapping[str, Any], *, budget: int = 240
) -> tuple[SolverState, float]:
    """Return the state whose logits are transformers', or the nearest that was found, with its error."""
    shapes = {name: tuple(tensor.shape) for name, tensor in built.published.items()}
    error = error_of(state, built.published, built.logits, built.logits)
    try:
        state.config()
    except ConfigError:
        return state, math.inf
    if error <= TOLERANCE:
        return state, error
    numbers = derived_numbers(values)
    tried = 0
    for what, lengths, prefixes in STAGES:
        if what and what not in built.without:
            continue
        tensors, expected = built.without[what] if what else (built.published, built.logits)
        now = error_of(state, tensors, expected, lengths)
        while now > TOLERANCE and tried < budget:
            best, least, scores = None, now, []
            for other in _alternatives(state, shapes, pool, prefixes, numbers):
                tried += 1
                its = error_of(other, tensors, expected, lengths)
                scores.append((its, len(scores), other))
                if its < least:
                    best, least = other, its
                if its <= TOLERANCE or tried >= budget:
                    break
            if least > TOLERANCE and least > 0.2 * now:
                for _, _, first in sorted(scores)[:2]:
                    for other in _alternatives(first, shapes, pool, prefixes, {}):
                        tried += 1
                        its = error_of(other, tensors, expected, lengths)
                        if its < least:
                            best, least = other, its
                        if its <= TOLERANCE or tried >= budget:
                            break
                    if least <= TOLERANCE or tried >= budget:
                        break
            if best is None or least > 0.9 * now:
                break
            state, now = best, least
    return state, error_of(state, built.published, built.logits, built.logits)
