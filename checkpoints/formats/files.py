"""The files of a folder that declares formats, and what reading their scales checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from te_models.layers.quantizer import Quantizer

from ..io.box_reads import cut_rows
from ..io.boxes import Shape
from ..io.errors import CheckpointError
from ..io.store import FileStore
from . import numbers
from .encode import number_amax, number_error
from .format import Declaration, MixedFormat, Part, WeightFormat
from .namespace import FieldNamespace
from .numbers import check_scale_values
from .views import ViewStore


@dataclass(frozen=True)
class QuantizedFiles:
    """The files of a folder that declares a format, or several.

    store: their tensors as fields and values; found: how these store the model. formats: quantized weight -> its
    format; parameters: the same by the names of the model. activations: tensors that scale activations; no conversion
    computes with them. quantizer: the form of the fields, of several formats the first's; None: there are none.
    wanted: another form, to be made of these fields or values. scales: those that the files call otherwise than they
    are seen -> their names in the files.
    """

    declaration: Declaration
    files: FileStore
    store: ViewStore
    found: FieldNamespace
    formats: Mapping[str, WeightFormat]
    parameters: Mapping[str, WeightFormat]
    activations: tuple[str, ...]
    quantizer: Quantizer | None
    dtype: torch.dtype
    wanted: Quantizer | None = None
    scales: Mapping[str, str] = field(default_factory=dict)

    @property
    def format(self) -> WeightFormat | MixedFormat:
        """The declared format, or formats."""
        return self.declaration.format

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of quantized weights."""
        return tuple(self.formats)

    def check_scales(self) -> None:
        """Read all scales, once, and raise CheckpointError for one that no quantization gives: NaN, infinite, negative.

        Scales that become bytes have to be powers of two, and tensors that follow from a weight's shape what they say.
        """
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        bytes_wanted = self.quantizer is not None and self.quantizer.FORMAT == "mxfp8"
        for weight, weight_format in self.formats.items():
            in_fields = weight + weight_format.data.suffix in self.found.fields
            for part in weight_format.scales:
                if part.meaning != "zero":
                    pow2, signed = bytes_wanted and in_fields, weight_format.integers
                    _check_scale(self.files, weight + part.suffix, part, pow2=pow2, signed=signed)
            for beside in weight_format.beside:
                name = weight + beside.suffix
                if name in self.files.tensors and beside.otherwise is None:
                    _check_beside(self.files, name, beside.value(self.shapes[weight]))
        return True

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape [..., out, in] of each quantized weight."""
        return {weight: weight_shape(self.files, weight, form) for weight, form in self.formats.items()}

    def factor_error(self) -> float:
        """Return the largest relative error of one number per matrix that our storage keeps as an amax."""
        errors = (number_error(part, number_amax(part, n), n) for part, n, _ in self.numbers_of_matrices())
        return max(errors, default=0.0)

    def numbers_of_matrices(self) -> Iterator[tuple[Part, torch.Tensor, list[str]]]:
        """Yield the part with one factor or divisor per matrix, all of its numbers, and the name of the tensor that
        each is from, for each format that has one."""
        for weight_format in self.format.formats:
            part = weight_format.parts[-1]
            weights = [weight for weight, form in self.formats.items() if form == weight_format]
            if part.meaning in ("factor", "divisor") and weights:
                found = {w + part.suffix: self.files.view(w + part.suffix).flatten().float() for w in weights}
                names = [name for name, number in found.items() for _ in range(number.numel())]
                yield part, torch.cat(list(found.values())), names


def weight_shape(files: FileStore, weight: str, weight_format: WeightFormat) -> Shape:
    """Return the shape [..., out, in] of a weight by its elements."""
    data = weight_format.data
    shape = files.tensors[weight + data.suffix].shape
    if data.grouped is not None:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return (*shape[:-1], shape[-1] * (data.block[1] if data.block else 1))


def _check_beside(files: FileStore, name: str, value: torch.Tensor) -> None:
    stored = files.view(name)
    if not torch.equal(stored.long(), value):
        found, wanted = stored.tolist(), value.tolist()
        raise CheckpointError(f"{name!r} is {str(found)[:60]}, and its weight has {str(wanted)[:60]}")


def _check_scale(files: FileStore, name: str, part: Part, *, pow2: bool, signed: bool) -> None:
    for box in cut_rows(files.tensors[name].shape, 1 << 22):
        stored = files.read(name, box)
        check_scale_values(name, stored, signed=signed)
        scales = numbers.scale_to_float(stored)
        if pow2 and part.meaning == "scale" and not numbers.is_power_of_two(scales).all():
            raise CheckpointError(
                f"{name!r} has a scale that is not a power of two, as storage in mxfp8 needs; --storage float8_block "
                "takes it over, --allow-requantize quantizes it anew"
            )
