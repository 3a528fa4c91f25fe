"""Moments that Megatron's distributed optimizer stores flattened, seen as tensors of parameters.

`dp_reshardable`: of each rank, one vector of all its parameters, the last one first, in buckets:

    optimizer.distributed.dp_group_idx_R.gbuf_idx_G.dtype_D.bucket_idx_B.exp_avg

A parameter begins at a multiple of 64 elements. Which order they have is in no file: it is that of Megatron-Core's
modules, and the copies of the weights that lie beside the moments (`param`) prove it.

`fully_sharded_model_space`: of a parameter [X, Y] that ranks split into parts [x, y], a tensor [X / x, Y / y, x * y].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from te_models.config import ModelConfig
from te_models.lazy import torch

from ..io.boxes import Box, Range, Shape, extents, full, intersect, slices
from ..io.dtypes import torch_dtype
from ..io.errors import CheckpointError
from ..io.header import TensorInfo, byte_count
from ..io.store import ComputedStore, Store
from ..mapping.tensor_map import Namespace
from .ranks import TABLES, ParallelSizes, RankFiles, RankPlace

_BUCKET = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)")
_ALIGNED = 64
_COMPARED = 4096
"""Elements of a weight that are compared with its copy."""
_AROUND = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
MODULES = {
    "Transformer Engine's": (
        *("self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm"),
        *("self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.linear_fc1", "mlp.linear_fc2"),
        *("mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts"),
    ),
    "its own": (
        *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm"),
        *("self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.linear_fc1", "mlp.linear_fc2"),
        *("mlp.experts.local_experts", "mlp.shared_experts"),
    ),
}
"""Modules of a layer in the order in which Megatron-Core makes them, with Transformer Engine's modules or its own."""
_KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


def has_buckets(names: Mapping[str, object]) -> bool:
    """Whether a checkpoint has vectors of several parameters."""
    return any(_BUCKET.fullmatch(name) for name in names)


class VectorSpan(NamedTuple):
    """Where a tensor lies in a vector of the store."""

    key: str
    begin: int
    shape: Shape


class SpanStore(ComputedStore):
    """Tensors that are parts of vectors of another store."""

    def __init__(self, store: Store, spans: Mapping[str, VectorSpan]) -> None:
        self._store, self._spans = store, spans
        self.tensors = {name: _like(store.tensors[span.key].dtype, span.shape) for name, span in spans.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        span = self._spans[name]
        each = math.prod(span.shape[1:])
        rows = box[0] if box else Range(0, 1)
        begin, end = rows.start, _end(rows)
        held = self._store.read(span.key, (Range(span.begin + begin * each, span.begin + end * each),))
        return held.view(-1, *span.shape[1:])[slices((Range(0, end - begin, rows.step), *box[1:]))] if box else held[0]


class TiledStore(ComputedStore):
    """Tensors whose parts are stored flattened: [X / x, Y / y, x * y] of [X, Y]. names: to theirs in the store."""

    def __init__(self, store: Store, names: Mapping[str, str], shapes: Mapping[str, Shape]) -> None:
        self._store, self._names = store, names
        self.tensors = {name: _like(store.tensors[its].dtype, shapes[name]) for name, its in names.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        stored, shape = self._names[name], self.tensors[name].shape
        tiles = self._store.tensors[stored].shape[:-1]
        part = tuple(size // count for size, count in zip(shape, tiles, strict=True))
        around = tuple(Range(r.start, _end(r)) for r in box)
        out = torch.empty(extents(around), dtype=torch_dtype(self.tensors[name].dtype), device="cpu")
        for number in range(math.prod(tiles)):
            place = [number // math.prod(tiles[d + 1 :]) % count for d, count in enumerate(tiles)]
            its = tuple(Range(i * n, (i + 1) * n) for i, n in zip(place, part))
            inner = intersect(its, around)
            if inner is None:
                continue
            where = (*(Range(i, i + 1) for i in place), Range(0, math.prod(part)))
            held = self._store.read(stored, where).reshape(part)
            held = held[tuple(slice(r.start - t.start, r.stop - t.start) for r, t in zip(inner, its))]
            out[tuple(slice(r.start - b.start, r.stop - b.start) for r, b in zip(inner, around))] = held
        return out[tuple(slice(None, None, r.step) for r in box)]


def _end(r: Range) -> int:
    """Return the index behind the last one."""
    return max(r.stop - r.step + 1, r.start)


def is_tiled(found: Shape, shape: Shape) -> bool:
    """Whether a stored shape is that of a parameter whose parts are flattened."""
    if len(found) != len(shape) + 1 or any(not n or size % n for size, n in zip(shape, found)):
        return False
    return found[-1] == math.prod(size // n for size, n in zip(shape, found))


def _like(dtype: str, shape: Shape) -> TensorInfo:
    return TensorInfo(dtype, shape, 0, byte_count(dtype, shape))


def open_buckets(
    store: Store,
    config: ModelConfig,
    weights: tuple[Store, Namespace],
    states: Sequence[str],
    split: ParallelSizes,
    where: Path,
) -> Iterator[tuple[Store, Namespace]]:
    """Yield, of each state ("exp_avg", "param"), the tensors of all ranks and how they store the model.

    weights: of the same checkpoint; they prove the order. Raises CheckpointError where no order fits."""
    if split.ep > 1 or split.chunks > 1:
        raise CheckpointError(
            f"{where} has moments that ranks flattened together, of {split.ep} shares of experts and {split.chunks} "
            "chunks of layers; allowed: 1. Megatron writes them by parameter with --dist-ckpt-optim-fully-reshardable"
        )
    buckets: dict[int, dict[tuple[int, int], str]] = {}
    for name in store.tensors:
        match = _BUCKET.fullmatch(name)
        if match is not None:
            key = name.removesuffix(match[5])
            buckets.setdefault(int(match[1]), {})[int(match[2]), int(match[4])] = key
    if sorted(buckets) != list(range(split.tp * split.pp)):
        raise CheckpointError(
            f"{where} has moments of {len(buckets)} ranks, and its arguments say {split.tp} tensor parallel ranks "
            f"times {split.pp} stages"
        )
    for order, modules in MODULES.items():
        ranks = RankFiles(config, split, _vocabulary(config, split, store), local=order == "its own")
        spans = _spans(store, ranks, modules, buckets)
        if spans is None or not _proven(store, ranks, spans, weights):
            continue
        for state in states:
            named = {name: span._replace(key=span.key + state) for name, span in spans.items()}
            namespace = ranks.namespace()
            yield SpanStore(store, {name: named[name] for name in namespace.stored}), namespace
        return
    raise CheckpointError(
        f"{where} has moments that ranks flattened together, in an order of parameters that is not Megatron-Core's, or "
        "of another model; Megatron writes them by parameter with --dist-ckpt-optim-fully-reshardable"
    )


def _vocabulary(config: ModelConfig, split: ParallelSizes, store: Store) -> int:
    info = next((info for name, info in store.tensors.items() if name.endswith(TABLES[0])), None)
    rows = config.vocab_size if info is None or not info.shape else max(info.shape[0], config.vocab_size)
    return -(-rows // split.tp) * split.tp


def _spans(
    store: Store, ranks: RankFiles, modules: Sequence[str], buckets: Mapping[int, Mapping[tuple[int, int], str]]
) -> dict[str, VectorSpan] | None:
    """Return where every rank's parameters are, without the last part of the key; None where they do not fill it."""
    namespace = ranks.namespace()
    copies = ranks.copies(namespace.stored)
    shapes = {name: info.shape for name, info in namespace.stored.items()}
    shapes |= {copy: shapes[its] for copy, its in copies.items()}
    spans: dict[str, VectorSpan] = {}
    for rank, held in buckets.items():
        pp, tp = divmod(rank, ranks.split.tp)
        at = str(RankPlace(tp, pp))
        own = [name.removeprefix(at) for name in shapes if name.startswith(at) and not name.endswith(".expert_bias")]
        order = sorted(own, key=lambda name: sort_key(name, modules), reverse=True)
        free = iter(sorted(held))
        key, end, size = "", 0, 0
        for name in order:
            begin = -(-end // _ALIGNED) * _ALIGNED
            if begin >= size:
                place = next(free, None)
                if place is None:
                    return None
                key, begin = held[place], 0
                size = store.tensors[f"{key}exp_avg"].shape[0] if f"{key}exp_avg" in store.tensors else 0
            shape = shapes[at + name]
            whole = (ranks.rows, *shape[1:]) if name in TABLES else shape  # rows that only fill up are there, too
            end = begin + math.prod(whole)
            if end > size:
                return None
            spans[at + name] = VectorSpan(key, begin, shape)
        if next(free, None) is not None or -(-end // _ALIGNED) * _ALIGNED < size:
            return None
    return spans


def sort_key(name: str, modules: Sequence[str]) -> tuple[Any, ...]:
    """Return by what names of a rank's parameters sort as Megatron-Core makes them. modules: one of MODULES."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return (0, _AROUND.index(name)) if name in _AROUND else (2, name != "decoder.final_layernorm.weight", name)
    part, _, kind = match[2].rpartition(".")
    module = next((n for n, its in enumerate(modules) if part == its or part.startswith(f"{its}.")), len(modules))
    word = kind.rstrip("0123456789")
    number = [int(n) for n in re.findall(r"\d+", f"{part}.{kind}")]
    return 1, int(match[1]), module, number[:-1] if kind != word else number, part, _KINDS.index(word), number


def _proven(store: Store, ranks: RankFiles, spans: Mapping[str, VectorSpan], weights: tuple[Store, Namespace]) -> bool:
    """Whether the beginning of every weight of the checkpoint is that of its copy."""
    from ..mapping.plan import OutputTensor
    from ..mapping.stream import read_rows
    from ..mapping.tensor_map import compose

    held, source = weights
    target = ranks.namespace()
    for name, pieces in compose(source, target).items():
        span, shape = spans[name], target.stored[name].shape
        key = f"{span.key}param"
        if key not in store.tensors:
            return False
        output = OutputTensor(name, held.tensors[pieces[0].source].dtype, shape, tuple(pieces))
        rows = min(shape[0], -(-_COMPARED // max(1, math.prod(shape[1:]))))
        weight = read_rows(held, output, 0, rows)
        copy = SpanStore(store, {name: VectorSpan(key, span.begin, shape)}).read(name, full((rows, *shape[1:])))
        if not torch.equal(copy.to(weight.dtype), weight):
            return False
    return True
