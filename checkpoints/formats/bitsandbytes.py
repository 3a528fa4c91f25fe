"""bitsandbytes' four bits (arXiv 2305.14314): `quant_method` "bitsandbytes", read as values.

    X.weight U8 [M * K / 2, 1]         codes, two in a byte, the even one in the high half
    X.weight.quant_map F32 [16]        the value of each code: NF4's or FP4's
    X.weight.absmax F32 [blocks]       a factor per `blocksize` values that follow one another in the whole matrix; U8
                                       with `X.weight.nested_absmax`, `nested_quant_map` [256] and an offset
    X.weight.quant_state.bitsandbytes__nf4   U8: a JSON object with the shape, the blocksize and the offset

No form of ours has such numbers. What is seen of X.weight is `X.weight_values`, its values in float32.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..io.boxes import Box, Range, Shape, full
from ..io.errors import CheckpointError, quote
from ..io.store import FilesSeen, FileStore
from ..io.strict_json import parse_object
from .format import MixedFormat, Part, WeightFormat, one_of

_STATE = ".quant_state.bitsandbytes__"
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
FOUR_BITS = WeightFormat(
    name="bitsandbytes-4bit",
    element="values",
    parts=(Part("data", "_values", ("F32",), "elements", (1, 1)),),
)


def read(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that `quantization_config` declares."""
    one_of(config, "load_in_4bit", (True,), None)
    one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return FOUR_BITS


def seen_as_values(files: FileStore, declared: WeightFormat | MixedFormat) -> FileStore:
    """Return the files with such weights as their values."""
    if declared is not FOUR_BITS:
        return files
    states = {name.partition(_STATE)[0]: name for name in files.tensors if _STATE in name}
    return _Values(files, {weight: _State(files, weight, name) for weight, name in states.items()})


class _State:
    """What a weight's JSON object says."""

    def __init__(self, files: FileStore, weight: str, name: str) -> None:
        values = parse_object(files.view(name).contiguous().numpy().tobytes(), name)
        shape, size = values.get("shape"), values.get("blocksize")
        shape = shape if isinstance(shape, list) else []
        good = len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)
        if not good or type(size) is not int or size < 1:
            raise CheckpointError(f"{quote(name)} has no shape of a matrix and no blocksize")
        self.shape: Shape = tuple(shape)
        self.size, self.name = size, name
        self.nested = f"{weight}.nested_absmax" in files.tensors
        self.nested_size = values.get("nested_blocksize", 256)
        self.offset = values.get("nested_offset", 0.0)
        count = math.prod(self.shape)
        expected = {"": (count + 1) // 2, ".absmax": -(-count // size), ".quant_map": 16}
        if self.nested:
            if type(self.nested_size) is not int or self.nested_size < 1 or not isinstance(self.offset, int | float):
                raise CheckpointError(f"{quote(name)} has no nested_blocksize and nested_offset that are numbers")
            nested = -(-expected[".absmax"] // self.nested_size)
            expected |= {".nested_absmax": nested, ".nested_quant_map": 256}
        for suffix, wanted in expected.items():
            info = files.tensors.get(weight + suffix)
            found = None if info is None else math.prod(info.shape)
            if found != wanted:
                raise CheckpointError(f"{quote(weight + suffix)} has {found} entries; expected: {wanted}")


class _Values(FilesSeen):
    """Files of which some tensors are seen as the values that they stand for."""

    def __init__(self, files: FileStore, states: Mapping[str, _State]) -> None:
        self._states = states
        hidden = {f"{weight}.{kind}" for weight in states for kind in _BESIDE} | {*states}
        hidden |= {state.name for state in states.values()}
        super().__init__(files, {f"{w}_values": (w, "F32", state.shape) for w, state in states.items()}, hidden)

    def compute(self, name: str, box: Box) -> Tensor:
        weight, (rows, columns) = self._seen[name][0], box
        state = self._states[weight]
        width = state.shape[1]
        begin, end = rows.start * width, rows.stop * width
        packed = self._flat(weight, begin // 2, -(-end // 2)).int()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[begin % 2 :][: end - begin]
        blocks = torch.arange(begin, end, device="cpu") // state.size
        factors = self._factors(weight, state, int(blocks[0]), int(blocks[-1]) + 1)[blocks - blocks[0]]
        values = self._files.view(f"{weight}.quant_map").float().flatten()[codes] * factors
        return values.view(-1, width)[:: rows.step, columns.start : columns.stop : columns.step]

    def _flat(self, name: str, begin: int, end: int) -> Tensor:
        shape = self._files.tensors[name].shape
        part = (Range(begin, end), *full(shape[1:])) if math.prod(shape[1:]) == 1 else None
        if part is None:
            return self._files.view(name).flatten()[begin:end]
        return self._files.read(name, part).flatten()

    def _factors(self, weight: str, state: _State, begin: int, end: int) -> Tensor:
        stored = self._flat(f"{weight}.absmax", begin, end)
        if not state.nested:
            return stored.float()
        groups = torch.arange(begin, end, device="cpu") // state.nested_size
        own = self._files.view(f"{weight}.nested_absmax").float().flatten()[groups]
        return self._files.view(f"{weight}.nested_quant_map").float().flatten()[stored.long()] * own + state.offset
