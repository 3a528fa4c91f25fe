"""The index that earlier releases wrote: parts/index.json, read with no trust in its content.

    {"tensors": {"model.embedding.weight": {"dtype": "F32", "shape": [257, 64], "boxes": [
        {"begin": [0, 0], "shape": [129, 64], "file": "rank-00000.safetensors"}, ...]}}}

Its size grows with tensors x ranks, which few ranks of a large model bring beyond what is read.
"""

import math
from pathlib import Path
from typing import Any

import torch

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.dtypes import bit_width, torch_dtype
from te_models.checkpoints.io.errors import quote, shown_untrusted
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.io.weight_files import plain_file

from ..checks import PARTS
from .index import MOST, MOST_DIMENSIONS, OLD_INDEX, CheckpointIndex, Cutting, IndexedTensor

_WHERE = f"{PARTS}/{OLD_INDEX}"


def read_json(folder: Path) -> CheckpointIndex:
    """Return what index.json says, all of it checked. Raises CheckpointError."""
    values = read_object(plain_file(folder, OLD_INDEX), _WHERE)
    tensors: dict[str, IndexedTensor] = {}
    cuttings: dict[tuple[object, ...], Cutting] = {}
    files: dict[str, int] = {}
    for name, entry in _only(values, ("tensors",), _WHERE, dict)["tensors"].items():
        where = f"{quote(name)} in {_WHERE}"
        entry = _only(entry, ("dtype", "shape", "boxes"), where)
        dtype, shape = entry["dtype"], _sizes(entry["shape"], "shape", where)
        if not isinstance(dtype, str) or bit_width(dtype) not in (8, 16, 32, 64):
            raise CheckpointError(
                f"{where} has dtype {shown_untrusted(dtype)}; allowed: a dtype of safetensors of whole bytes"
            )
        if not isinstance(entry["boxes"], list):
            raise CheckpointError(f"{where} has boxes {shown_untrusted(entry['boxes'])}; allowed: a list")
        begins, sizes, holders = [], [], []
        for box in entry["boxes"]:
            box = _only(box, ("begin", "shape", "file"), f"a box of {where}")
            begin, size = (_sizes(box[key], key, f"a box of {where}") for key in ("begin", "shape"))
            if not isinstance(box["file"], str):
                raise CheckpointError(f"a box of {where} has file {shown_untrusted(box['file'])}; allowed: a name")
            if not len(begin) == len(size) == len(shape):
                raise CheckpointError(f"a box of {where} has other dimensions than its shape {list(shape)}")
            begins.append(begin)
            sizes.append(size)
            holders.append(files.setdefault(box["file"], len(files)))
        key = shape, tuple(begins), tuple(sizes)
        if key not in cuttings:
            table = (
                torch.tensor(v, dtype=torch.int64, device="cpu").view(len(begins), len(shape)) for v in (begins, sizes)
            )
            cuttings[key] = Cutting(shape, *table)
        tensors[name] = IndexedTensor(
            torch_dtype(dtype), cuttings[key], torch.tensor(holders, dtype=torch.int32, device="cpu")
        )
    index = CheckpointIndex(tensors, tuple(files))
    index.check(folder, _WHERE)
    return index


def _only(values: object, keys: tuple[str, ...], where: str, kind: type = object) -> dict[str, Any]:
    """Return an object with exactly these keys, whose values are of `kind`."""
    named = isinstance(values, dict) and values.keys() == {*keys}
    if not isinstance(values, dict) or not named or not all(isinstance(value, kind) for value in values.values()):
        raise CheckpointError(f"{where} is not an object of exactly {', '.join(keys)}")
    return values


def _sizes(values: object, key: str, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS or any(type(v) is not int for v in values):
        raise CheckpointError(
            f"{where} has {key} {shown_untrusted(values)}; allowed: at most {MOST_DIMENSIONS} integers"
        )
    if min(values, default=0) < 0 or math.prod(max(v, 1) for v in values) > MOST:
        raise CheckpointError(
            f"{where} has {key} {shown_untrusted(values)}; allowed: numbers from 0, of at most 2^62 elements"
        )
    return tuple(values)
