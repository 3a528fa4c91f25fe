"""Which part of a parameter a rank of a split model owns: ranges of indices along one dimension, or two.

Tensor parallelism splits the first projection of attention and of an MLP by rows, the second by columns. A projection
that joins several (q, k and v; gate and up) is split in each of them, so that a rank has whole heads and matching gate
and up rows. Embedding and output layer are split by words, of which ranks may have one fewer. Of latent attention, the
projection down to the latents is on every rank. Expert parallelism gives each rank consecutive whole experts; tensor
parallelism may split these further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_models.config import ModelConfig
from te_models.lazy import later

from ..io.boxes import Shape
from ..io.errors import CheckpointError
from .param_shapes import is_expert_stack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from te_models.layers.distributed import vocab_parallel
    from te_models.layers.quantizer import Quantizer, schema
else:
    torch, schema = later("torch"), later("te_models.layers.quantizer.schema")
    vocab_parallel = later("te_models.layers.distributed.vocab_parallel")

Ranges = tuple[tuple[int, int], ...]
Cuts = Mapping[int, Ranges]
"""Dimension -> the ranges (begin, end) of it that are meant, one after the other; all of the others."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_ATTENTION = re.compile(
    r".*\.self_attention\.(linear_qkv\.(weight|bias)|linear_(q|kv)_up\.weight|linear_proj\.weight|"
    r"(q|k)_layernorm\.weight|core_attention\..*|head_gate\.weight|qkv_bias)"
)
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_MLP = re.compile(r".*\.mlp\.(shared_experts\.|experts\.)?linear_(fc1\.(weight|bias)|fc2\.weight)(\d*)")
_SHARED_USE = re.compile(r".*\.shared_use\.(?:(fc1)_up|qkv_up\.\d+)\.weight")


@dataclass(frozen=True)
class ShardPlace:
    """A rank among those that share a model: number `tp_rank` of the `tp_size` that split layers, `ep_rank` of the
    `ep_size` among which experts are distributed, and `etp_rank` of the `etp_size` that split each expert; None: those
    that split the other layers."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None

    @property
    def expert_split(self) -> tuple[int, int]:
        """The number of the rank among those that split each expert, and how many these are."""
        if self.etp_rank is None or self.etp_size is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank, self.etp_size

    @property
    def number(self) -> int:
        """The rank's number among `count`."""
        if self.etp_size is not None and self.tp_size > 1:
            return self.tp_rank
        rank, ranks = self.expert_split
        return self.ep_rank * ranks + rank

    @property
    def count(self) -> int:
        """How many ranks share the work of reading the model: all that share it, or, where experts are split over other
        ranks than the layers, those that split the layers."""
        if self.etp_size is not None and self.tp_size > 1:
            return self.tp_size
        return self.ep_size * self.expert_split[1]


WHOLE = ShardPlace()
"""The only rank of a model that is not split."""


@dataclass(frozen=True)
class RankPart:
    """Indices of a parameter along `dim`: ranges (begin, end) in order; dim None: all of them. experts: (begin, end)
    along dimension 0, of a stack of experts; None: all of them."""

    dim: int | None = None
    ranges: Ranges = ()
    experts: tuple[int, int] | None = None

    def cuts(self) -> Cuts:
        """Return the ranges by dimension; none for the whole parameter."""
        cuts: dict[int, Ranges] = {} if self.experts is None else {0: (self.experts,)}
        return cuts if self.dim is None else cuts | {self.dim: self.ranges}

    def shape(self, whole: Shape) -> Shape:
        """Return the shape of the part."""
        return cut_shape(whole, self.cuts())

    def member(self) -> RankPart:
        """Return the part that this one of a stack has of each of its experts."""
        return RankPart(None if self.dim is None else self.dim - 1, self.ranges)

    def field_cuts(self, name: str, whole: Shape, quantizer: Quantizer) -> dict[str, Cuts]:
        """Return the ranges of each stored field that are this part of a quantized parameter of shape `whole`.

        A field with one entry per matrix is whole: its number goes with every part. Raises CheckpointError where a
        range begins or ends within a block.
        """
        from_end = 0 if self.dim is None else self.dim - len(whole)
        if self.dim is not None:
            block = schema.cut_multiple(quantizer, from_end)
            edges = {edge for cut in self.ranges for edge in cut}
            if any(edge % block and edge != whole[self.dim] for edge in edges):
                what = "rows" if from_end == -2 else "columns"
                raise CheckpointError(
                    f"{name} is quantized in blocks of {block} {what}, between which it cannot be split so; "
                    "allowed: fewer ranks, or plain weights (te-models dequantize)"
                )
        found: dict[str, Cuts] = {}
        for layout in schema.field_layouts(quantizer):
            cuts: dict[int, Ranges] = {} if self.experts is None else {0: (self.experts,)}
            if self.dim is not None and layout.block is not None:
                entries = (layout.entries(begin, end, from_end) for begin, end in self.ranges)
                cuts[len(whole) + layout.axis(from_end)] = tuple((first, first + count) for first, count in entries)
            found[layout.name] = cuts
        return found


def cut_shape(whole: Shape, cuts: Cuts) -> Shape:
    """Return the shape of what is left of a tensor."""
    return tuple(sum(e - b for b, e in cuts[d]) if d in cuts else n for d, n in enumerate(whole))


def cut_part(whole: Tensor, cuts: Cuts) -> Tensor:
    """Return the part of a whole tensor that is cut out so."""
    for dim, ranges in cuts.items():
        some = [whole.narrow(dim, begin, end - begin) for begin, end in ranges or ((0, 0),)]  # a shard may be empty
        whole = torch.cat(some, dim)
    return whole


def parts(config: ModelConfig, shapes: Mapping[str, Shape], place: ShardPlace) -> dict[str, RankPart]:
    """Return what a rank owns of each parameter; names and shapes as in `expected_tensors`, in the grouped
    layout where experts are distributed."""
    return {name: _part(config, name, shape, place) for name, shape in shapes.items()}


def _part(config: ModelConfig, name: str, shape: Shape, place: ShardPlace) -> RankPart:
    experts, (rank, ranks) = None, (place.tp_rank, place.tp_size)
    if is_expert_stack(name):
        rank, ranks = place.expert_split
    if place.ep_size > 1 and is_expert_stack(name):
        own = shape[0] // place.ep_size
        experts = (place.ep_rank * own, (place.ep_rank + 1) * own)
    split = _split(config, name, shape) if ranks > 1 else None
    if split is None:
        return RankPart(experts=experts)
    dim, blocks = split
    ranges, offset = [], 0
    for size in blocks:  # of which only vocabularies may be divided unequally
        first, end = vocab_parallel.vocab_range(size, rank, ranks)
        ranges.append((offset + first, offset + end))
        offset += size
    return RankPart(dim, tuple(ranges), experts)


def joined_blocks(config: ModelConfig, name: str, shape: Shape) -> dict[str, int]:
    """Return the rows of each matrix that a weight [out, in], or a stack of them, joins, by name: "q", "k", "v" and
    "gate" of attention, "gate" and "up" of an MLP, "q" and "kv" of a projection to latents, "kv" and "gate" of a
    compressor of keys, and the numbers of what a mixer joins; nothing for a weight that is one matrix. shape: of the
    whole parameter."""
    dim = len(shape) - 2
    if dim < 0:
        return {}
    layer = _layer_of(config, name)
    attention = config.attention_of(layer)
    if name.endswith(".linear_qkv_down.weight"):
        assert attention is not None, "the layer has its parameters"
        if attention.mla is not None:
            latent = attention.mla.kv_lora_rank + attention.mla.qk_pos_emb_head_dim
        else:
            latent = attention.key_channels
        return {"q": shape[dim] - latent, "kv": latent}
    if name.endswith("compressor.linear_in.weight"):
        return {"kv": shape[dim] // 2, "gate": shape[dim] // 2}
    split = _split(config, name, shape)
    if split is None or split[0] != dim or sum(split[1]) != shape[dim] or len(split[1]) < 2:
        return {}
    names: Iterable[str] = map(str, range(len(split[1])))
    if name.endswith(".self_attention.linear_qkv.weight") and attention is not None:
        names = attention.qkv_blocks(own_keys=config.kv_source(layer) is None)
    elif _MLP.fullmatch(name) is not None:
        names = ("gate", "up")
    return dict(zip(names, split[1], strict=True))


def _layer_of(config: ModelConfig, name: str) -> int:
    """Return the number of a layer that has such parameters. Layers that predict further tokens are of the last one's
    kind; a shared block has the attention of the layers that use it."""
    match = _LAYER.match(name)
    if match is None and config.shared_blocks is not None:
        return config.shared_blocks.layers[0]
    return config.num_layers - 1 if match is None else int(match[1])


def _split(config: ModelConfig, name: str, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension that is split and the blocks along it; None for what every rank has."""
    if name in _VOCABULARY:
        return 0, (shape[0],)
    layer = _layer_of(config, name)
    _, found, within = name.partition(".mixer.")
    if found:
        mixer = config.mixer_of(layer)
        assert mixer is not None, "the layer has its parameters"
        its = next(p for p in mixer.parameters(config.hidden_size) if p.name == within)
        return (its.dim, its.blocks) if its.blocks else None
    match, attention = _ATTENTION.fullmatch(name), config.attention_of(layer)
    if match is not None and attention is not None:
        rows = attention.qkv_rows(own_keys=config.kv_source(layer) is None)
        if "_layernorm" in match[1] and attention.qk_layernorm == "head":
            return None  # one norm for every head
        norm_of_each = attention.qk_layernorm == "each_head" and "_layernorm" in match[1]
        if norm_of_each or "_up" in match[1] or "head_gate" in match[1]:
            return 0, (shape[0],)
        if match[1] == "qkv_bias":
            return 0, rows[:-1]
        if not match[1].startswith("linear_qkv"):
            dim = len(shape) - 1
            return dim, (shape[dim],)
        return 0, rows
    match = _MLP.fullmatch(name)
    if match is None:
        adapter = _SHARED_USE.fullmatch(name)
        return None if adapter is None else (0, _equal(shape[0], 2 if adapter[1] and config.mlp.gated else 1))
    if match[2] == "fc2.weight":
        dim, blocks = len(shape) - 1, 1
    else:
        dim, blocks = len(shape) - (2 if match[3] == "weight" else 1), 2 if config.mlp.gated else 1
    return dim, _equal(shape[dim], blocks)


def _equal(rows: int, blocks: int) -> tuple[int, ...]:
    return (rows // blocks,) * blocks
