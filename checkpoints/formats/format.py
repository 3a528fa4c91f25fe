"""What a quantized format of Hugging Face files is: which tensors a weight [..., out, in] is stored as.

    fp8                 X.weight F8_E4M3 [M, K]          X.weight_scale_inv F32 [M/128, K/128]
    mxfp4               X_blocks U8 [.., M, K/32, 16]    X_scales U8 [.., M, K/32]
    pack-quantized      X.weight_packed I32 [M, K/8]     X.weight_scale BF16 [M, K/group]

Every format is one declaration of this kind in a separate file. How it is read, written, checked and reported follows
from the declaration. `one_of` and `section` read the fields of `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from te_models.layers.quantizer import FP8Quantizer, Quantizer

from ..families.base.fields import shorten_value
from ..io.boxes import Shape
from ..io.errors import CheckpointError

Entries = Literal["matrix", "apart", "column"]
Element = Literal["e4m3", "e2m1", "int4", "int8", "values"]
Meaning = Literal["elements", "scale", "zero", "factor", "divisor"]
FLOAT_SCALES = ("F32", "BF16", "F16")
BYTE_SCALES = ("U8", "F8_E8M0")
WHOLE = 1 << 62
"""As the columns of a block: all of the matrix's."""


@dataclass(frozen=True)
class Part:
    """One of the tensors of a quantized weight.

    Arguments:
        field: the part of a quantized tensor that it becomes: "data", "scale_inv", "zero_point" or "amax".
        suffix: what its name adds to the weight's.
        dtypes: what it may be in files; the first is written where nothing else is known.
        meaning: elements; the scale of a block, or its zero point, of several rows in a word; or one float32 per
            matrix that values are multiplied with (factor) or divided by (divisor).
        block: rows and columns of the weight per entry; None: one entry per matrix, in shape [] or [1].
        grouped: the last dimension is cut into groups of this many bytes, [..., K/32, 16].
        one: one entry per matrix is written in shape [1].
        entries: how those per block lie: as a matrix, "apart" with dimensions of size 1, [M/128, 1, K/128, 1], or as
            a "column" without its last dimension, [M].
    """

    field: str
    suffix: str
    dtypes: tuple[str, ...]
    meaning: Meaning
    block: tuple[int, int] | None
    grouped: int | None = None
    one: bool = False
    entries: Entries = "matrix"

    def shapes(self, weight: Shape) -> tuple[Shape, ...]:
        """Return the shapes that it may have in files for a weight of this shape."""
        if self.block is None:
            return (weight[:-2], (*weight[:-2], 1))
        shape = block_counts(weight, self.block)
        if self.entries != "matrix":
            return ((*shape[:-1], 1, shape[-1], 1) if self.entries == "apart" else shape[:-1],)
        return ((*shape[:-1], -(-shape[-1] // self.grouped), self.grouped),) if self.grouped else (shape,)


@dataclass(frozen=True)
class Beside:
    """A tensor beside a weight that says nothing which its shape does not.

    Arguments:
        suffix: what its name adds to the weight's.
        dtypes: what it may be in files.
        required: whether every weight has it.
        value: what it is, for a weight of a shape [..., out, in].
        otherwise: why numbers cannot be taken over where it is something else; None: then the files are wrong.
    """

    suffix: str
    dtypes: tuple[str, ...]
    required: bool
    value: Callable[[Shape], torch.Tensor]
    otherwise: str | None = None


@dataclass(frozen=True)
class CodePacking:
    """How columns are packed. bits: of a code; order: of the codes of a word, from its lowest bits on; along_rows:
    whether a word has codes of several columns of one row (GPTQ), else of several rows of one column; less: what is
    taken from zero points before they are stored."""

    bits: int
    order: tuple[int, ...]
    along_rows: bool
    less: int = 0

    @property
    def per_word(self) -> int:
        """Codes in a word."""
        return 32 // self.bits


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightFormat:
    """A format; two are equal where they are the same object.

    Arguments:
        name: what users call it; `te-models export --format` takes it.
        element: what the numbers are, before scales.
        parts: the tensors of a weight, data first.
        storages: the forms of ours that hold it exactly, by the name that `te-models import --storage` takes; the first
            is the default. Empty: no form holds it.
        then: further forms that hold it exactly if its numbers allow it, made from the first of the storages.
        takes: whether a form of ours can be written in it, wherever its numbers come from.
        takes_even: whether one with smaller blocks can, where its scales are the same throughout each larger block.
        requantizer: what quantizes values for it; None: the first of the storages.
        activations: names of tensors beside a weight that scale activations: kept, and given back by an export.
        attention: the same beside the projections of attention, scales of its queries, keys and values; also in the
            modules of single projections, `k_proj.k_scale`.
        columns: the weight's columns must be a multiple of this.
        transposed_stacks: of experts [E, in, out], see `stacks.py`.
        beside: tensors beside a weight that follow from its shape.
        packing: how files pack columns instead, see `packed_columns.py`; None: as the parts say.
    """

    name: str
    element: Element
    parts: tuple[Part, ...]
    storages: Mapping[str, Quantizer] = field(default_factory=dict)
    then: Mapping[str, Quantizer] = field(default_factory=dict)
    takes: Callable[[Quantizer], bool] = lambda quantizer: False
    takes_even: Callable[[Quantizer], bool] = lambda quantizer: False
    requantizer: Quantizer | None = None
    activations: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    columns: int = 1
    transposed_stacks: bool = False
    beside: tuple[Beside, ...] = ()
    packing: CodePacking | None = None

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """This one alone; see `MixedFormat`."""
        return (self,)

    def of(self, weight: str) -> WeightFormat | None:
        """Return the format of a weight, by its name: this one."""
        return self

    @property
    def integers(self) -> bool:
        """Whether its elements are integers."""
        return self.element in ("int4", "int8")

    @property
    def data(self) -> Part:
        """The part with the elements."""
        return self.parts[0]

    @property
    def scales(self) -> tuple[Part, ...]:
        """The other parts."""
        return self.parts[1:]

    @property
    def quantizer(self) -> Quantizer:
        """What quantizes values so that their fields can be written in it; of a format that can be written."""
        return self.requantizer or next(iter(self.storages.values()))

    def part(self, field: str) -> Part:
        """Return the part that becomes this field."""
        return next(part for part in self.parts if part.field == field)


@dataclass(frozen=True)
class MixedFormat:
    """Several formats in one folder. rules: for the name of a module, the format of its weight; the first that gives
    one counts, and a module that no rule knows is not quantized."""

    rules: tuple[tuple[Callable[[str], bool], WeightFormat], ...]

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys(found for _, found in self.rules))

    @property
    def name(self) -> str:
        """What users call it."""
        return " + ".join(dict.fromkeys(found.name for found in self.formats))

    def of(self, weight: str) -> WeightFormat | None:
        """Return the format of a weight, by its name; None: it is not quantized."""
        module = weight.removesuffix(".weight")
        return next((found for matches, found in self.rules if matches(module)), None)


@dataclass(frozen=True)
class Declaration:
    """What a folder says about its quantization: the format or formats, and the JSON that says so.

    config: the fields of config.json that say so, None where they are not there; separate: hf_quant_config.json.
    """

    format: WeightFormat | MixedFormat
    config: Mapping[str, Any] | None
    separate: Mapping[str, Any] | None = None


def is_e4m3(quantizer: Quantizer) -> bool:
    """Whether a form's numbers are E4M3."""
    return isinstance(quantizer, FP8Quantizer) and quantizer.fp8_dtype == torch.float8_e4m3fn


def scale_beside(weight: str, kind: str) -> str:
    """Return the name of an activation's scale beside a weight: of a module, or of a fused tensor of experts, whose
    name then comes in front."""
    module = weight.removesuffix(".weight")
    return f"{weight}_{kind}" if module == weight else f"{module}.{kind}"


def block_counts(shape: Shape, block: tuple[int, int]) -> Shape:
    """Return how many blocks a matrix [..., rows, columns] has."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def one_of(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """Return a field that must have one of these values; `default` where it is absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise CheckpointError(
            f"the quantization configuration has {name} = {shorten_value(value)}; supported: "
            f"{', '.join(map(str, allowed))}"
        )
    return value


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside a configuration."""
    value = config.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"the quantization configuration has no {name!r} object")
    return value
