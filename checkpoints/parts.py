"""Which part of a parameter a rank of a tensor-parallel model owns: ranges of indices along one dimension.

The first projection of attention and of an MLP is split by rows, the second by columns. A projection that joins several
(q, k and v; gate and up) is split in each of them, so that a rank has whole heads and matching gate and up rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from te_models.config import ModelConfig

from .boxes import Shape
from .naming import head_sizes

_ATTENTION = re.compile(r".*\.self_attention\.(linear_qkv\.(weight|bias)|linear_proj\.weight|core_attention\..*)")
_MLP = re.compile(r".*\.mlp\.(shared_experts\.|experts\.)?linear_(fc1\.(weight|bias)|fc2\.weight)(\d*)")


@dataclass(frozen=True)
class Part:
    """Indices of a parameter along `dim`: ranges (begin, end) in order; dim None is the whole parameter."""

    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    def shape(self, whole: Shape) -> Shape:
        """Return the shape of the part."""
        if self.dim is None:
            return whole
        size = sum(end - begin for begin, end in self.ranges)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])


def parts(config: ModelConfig, shapes: Mapping[str, Shape], rank: int, ranks: int) -> dict[str, Part]:
    """Return what `rank` of `ranks` owns of each parameter; names and shapes are those of `expected_tensors`."""
    return {name: _part(config, name, shape, rank, ranks) for name, shape in shapes.items()}


def _part(config: ModelConfig, name: str, shape: Shape, rank: int, ranks: int) -> Part:
    split = _split(config, name, shape) if ranks > 1 else None
    if split is None:
        return Part()
    dim, blocks = split
    ranges, offset = [], 0
    for size in blocks:
        own = size // ranks
        ranges.append((offset + rank * own, offset + (rank + 1) * own))
        offset += size
    return Part(dim, tuple(ranges))


def _split(config: ModelConfig, name: str, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension that is split and the blocks along it; None for what every rank has."""
    match = _ATTENTION.fullmatch(name)
    if match is not None:
        if not match[1].startswith("linear_qkv"):
            dim = len(shape) - 1
            return dim, (shape[dim],)
        heads, groups, size = head_sizes(config)
        return 0, (heads * size, groups * size, groups * (config.attention.v_head_dim or size))
    match = _MLP.fullmatch(name)
    if match is None:
        return None
    if match[2] == "fc2.weight":
        dim, blocks = len(shape) - 1, 1
    else:
        dim, blocks = len(shape) - (2 if match[3] == "weight" else 1), 2 if config.mlp.gated else 1
    return dim, (shape[dim] // blocks,) * blocks
