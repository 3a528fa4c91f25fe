"""Which tensor goes into which file, and the headers of those files: all decided before any data moves."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..io.dtypes import bit_width
from ..io.errors import CheckpointError
from ..io.strict_json import dump_object
from ..io.weight_files import SINGLE
from ..mapping.plan import ConversionPlan, OutputTensor
from ..mapping.quantized_format import write_metadata

MAX_SHARD_BYTES = 5_000_000_000

MAX_SHARD_TENSORS = 10_000
"""Keeps a file's header, descriptions of quantized parameters included, far below what a reader accepts."""


def parse_size(max_shard_size: int | str) -> int:
    """Return a number of bytes given as such, or as text with its unit: "5GB" (10^9), "5GiB" (2^30), "500000B"."""
    if isinstance(max_shard_size, int):
        return max_shard_size
    match = re.fullmatch(r"(\d{1,99}(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b)", max_shard_size.strip().lower())
    size = 0
    if match is not None:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))
    if size < 1:
        allowed = "a size with its unit, such as 500MB or 2GiB"
        raise CheckpointError(f"max_shard_size is {max_shard_size!r}; allowed: {allowed}")
    return size


@dataclass(frozen=True)
class Shard:
    """One file of a plan."""

    file: str
    outputs: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(output.nbytes for output in self.outputs)


def split_shards(plan: ConversionPlan, max_shard_bytes: int) -> list[Shard]:
    """Distribute outputs over files of at most `max_shard_bytes` of data (and MAX_SHARD_TENSORS) each, in plan order.

    A single larger output gets a file to itself, and the entries of one quantized parameter stay together.
    """
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes!r}; allowed: a positive number of bytes")
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for unit in _units(plan):
        nbytes = sum(output.nbytes for output in unit)
        full = size + nbytes > max_shard_bytes or len(groups[-1]) + len(unit) > MAX_SHARD_TENSORS
        if groups[-1] and full:
            groups.append([])
            size = 0
        groups[-1] += unit
        size += nbytes
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    )
    shards = []
    for name, group in zip(names, groups):
        present = {output.name for output in group}
        described = write_metadata({n: plan.formats[n] for n in plan.formats if n in present})
        metadata = described | dict(plan.metadata)
        shards.append(Shard(name, tuple(sorted(group, key=alignment_key)), metadata))
    return shards


def _units(plan: ConversionPlan) -> Iterable[list[OutputTensor]]:
    """Outputs one by one, but all entries of a quantized parameter (consecutive, its name first) as one unit, and all
    outputs of one owner."""
    unit: list[OutputTensor] = []
    owner: str | None = None
    for output in plan.outputs:
        entry = owner is not None and output.name.startswith(owner) and output.name not in plan.formats
        if unit and not entry and not (output.owner and output.owner == unit[-1].owner):
            yield unit
            unit = []
        if not unit:
            owner = output.name if output.name in plan.formats else None
        unit.append(output)
    if unit:
        yield unit


def alignment_key(output: OutputTensor) -> int:
    """Return the sort key of outputs in a file: plan order, but sizes that would misalign what follows go last, widest
    dtype first."""
    return 0 if output.nbytes % 8 == 0 else 64 // (bit_width(output.dtype) or 8)


def header_bytes(shard: Shard) -> bytes:
    """Return the file's header, length prefix included, padded so that the data starts at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(shard.metadata)}
    position = 0
    for output in shard.outputs:
        offsets = [position, position + output.nbytes]
        entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": offsets}
        position += output.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_bytes(shards: Sequence[Shard]) -> bytes:
    """Return the content of the index that says which file holds which tensor."""
    weight_map = {output.name: shard.file for shard in shards for output in shard.outputs}
    total = sum(shard.nbytes for shard in shards)
    return dump_object({"metadata": {"total_size": total}, "weight_map": weight_map})
