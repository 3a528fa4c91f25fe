"""Which part of a parameter a rank of a split model owns: ranges of indices along one dimension, or two.

Tensor parallelism splits the first projection of attention and of an MLP by rows, the second by columns. A projection
that joins several (q, k and v; gate and up) is split in each of them (`blocks`), so that a rank has whole heads and
matching gate and up rows. Embedding and output layer are split by words, of which ranks may have one fewer. Of latent
attention, the projection down to the latents is on every rank. Expert parallelism gives each rank consecutive whole
experts; tensor parallelism may split these further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_models.config import ModelConfig
from te_models.lazy import later

from ..io.boxes import Shape
from ..io.errors import CheckpointError
from .blocks import split_blocks
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
    split = split_blocks(config, name, shape) if ranks > 1 else None
    if split is None:
        return RankPart(experts=experts)
    dim, blocks = split
    ranges, offset = [], 0
    for size in blocks:  # of which only vocabularies may be divided unequally
        first, end = vocab_parallel.vocab_range(size, rank, ranks)
        ranges.append((offset + first, offset + end))
        offset += size
    return RankPart(dim, tuple(ranges), experts)
