"""A folder of quantized files, opened: its tensors as fields of our storage where that is exact, else as values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

from ..io.box_reads import cut_rows
from ..io.dtypes import FLOATS, torch_dtype, with_most_bytes
from ..io.errors import CheckpointError
from ..io.store import FileStore
from ..plan.param_shapes import is_linear_weight
from ..plan.plan import match_tensors
from ..plan.tensor_map import Namespace, Stored
from . import numbers
from .encode import number_amax, number_error
from .format import Declaration, Part, WeightFormat, scale_beside
from .fp8 import FLOAT_BLOCKS, POW2_BLOCKS
from .namespace import FieldNamespace, field_namespace, upright
from .numbers import check_values
from .separate import VALUES
from .stacks import seen_upright
from .views import View, ViewStore, field_view, value_view

FORMS: dict[str, Quantizer] = {
    "float8": Float8CurrentScalingQuantizer(),
    "float8_block": Float8BlockQuantizer(),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
}
"""Storages in which any format's values can be requantized."""
_NOT_LINEAR = "only the weights of linear layers are stored quantized"


@dataclass(frozen=True)
class QuantizedFiles:
    """The files of a folder that declares a format.

    store: their tensors as fields and values; found: how these store the model. weights: the names of quantized
    weights. activations: tensors that scale activations, which no conversion computes with. quantizer: the form of the
    fields; None: there are none. wanted: another form, to be made of these fields or values.
    """

    declaration: Declaration
    files: FileStore
    store: ViewStore
    found: FieldNamespace
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    quantizer: Quantizer | None
    dtype: torch.dtype
    wanted: Quantizer | None = None

    @property
    def format(self) -> WeightFormat:
        """The declared format."""
        return self.declaration.format

    def check_scales(self) -> None:
        """Read all scales, once, and raise CheckpointError for one that no quantization gives: NaN, infinite, negative.

        Scales that become bytes have to be powers of two.
        """
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        bytes_wanted = self.quantizer is not None and self.quantizer.FORMAT == "mxfp8"
        for weight in self.weights:
            in_fields = weight + self.format.data.suffix in self.found.fields
            for part in self.format.scales:
                _check_scale(self.files, weight + part.suffix, part, pow2=bytes_wanted and in_fields)
        return True

    def factor_error(self) -> float:
        """Return the largest relative error of one number per matrix that our storage keeps as an amax."""
        numbers = self.numbers_of_matrices()
        return 0.0 if numbers is None else number_error(numbers[0], number_amax(*numbers[:2]), numbers[1])

    def numbers_of_matrices(self) -> tuple[Part, torch.Tensor, list[str]] | None:
        """Return the part with one factor or divisor per matrix, all of its numbers, and the name of the tensor that
        each is from; None in a format without one."""
        part = self.format.parts[-1]
        if part.meaning not in ("factor", "divisor"):
            return None
        found = {w + part.suffix: self.files.view(w + part.suffix).flatten().float() for w in self.weights}
        names = [name for name, number in found.items() for _ in range(number.numel())]
        return part, torch.cat(list(found.values())), names


def open_quantized(
    files: FileStore,
    high_precision: Namespace,
    declaration: Declaration,
    *,
    storage: str | None,
    where: str,
    any_storage: bool = False,
    float32: bool = False,
) -> QuantizedFiles:
    """Read the headers of quantized files, whose plain form a family stores as `high_precision` says.

    storage: a key of the format's `storages` or `then`, None for its first, VALUES for none; with any_storage also one
    of FORMS. float32: values are read as such, not in the dtype of the other weights.
    """
    weight_format = declaration.format
    files = seen_upright(files, high_precision, weight_format)
    weights = quantized_weights(high_precision, files, weight_format)
    if not weights:
        raise CheckpointError(f"{where} declares the format {weight_format.name} and has no tensor in it")
    high_precision = upright(high_precision, weights)
    activations = _activations(files, high_precision, weights, weight_format)
    _match(files, high_precision, weights, weight_format, where)
    quantizer, other = _storage(weight_format, storage, any_storage)
    name = main_float(files, (n for n in high_precision.stored if n not in weights), high_precision)
    dtype = torch_dtype(name)
    parameters = {link.name for link in high_precision.links if link.stored in weights}
    wanted = {p: quantizer for p in parameters if quantizer is not None and is_linear_weight(p)}
    promised = {name for name, form in wanted.items() if form == POW2_BLOCKS}
    wanted |= dict.fromkeys(_no_powers_of_two(files, high_precision, promised, weight_format), FLOAT_BLOCKS)
    to_bytes = {name for name, form in wanted.items() if any_storage and form.FORMAT == "mxfp8"}
    requantized = _no_powers_of_two(files, high_precision, to_bytes, weight_format)
    wanted = {name: form for name, form in wanted.items() if name not in requantized}

    def same(a: str, b: str) -> bool:
        return torch.equal(files.view(a).flatten().float(), files.view(b).flatten().float())

    found = field_namespace(high_precision, weights, weight_format, wanted, dtype, same)
    several = {name for name in found.inexact if wanted.get(name, FLOAT_BLOCKS) != FLOAT_BLOCKS}
    if storage is None and several and FLOAT_BLOCKS in weight_format.storages.values():
        # one scale per matrix is exact in blocks that repeat it, where what a parameter joins has several
        reasons = found.inexact
        wanted |= dict.fromkeys(several, FLOAT_BLOCKS)
        found = field_namespace(high_precision, weights, weight_format, wanted, dtype, same)
        found.inexact = {name: reasons[name] for name in found.inexact}
    owners = {link.stored: link.name for link in high_precision.links}
    if quantizer is not None:
        found.inexact |= dict.fromkeys(sorted(parameters - {*wanted}), _NOT_LINEAR)
    elif storage is None or other is not None:
        found.inexact |= dict.fromkeys(sorted(parameters), "no form of ours has such scales")
    found.inexact |= dict.fromkeys(sorted(requantized), "it has a scale that is not a power of two")
    views: dict[str, View] = {}
    hidden = {*activations, *(weight + part.suffix for weight in weights for part in weight_format.parts)}
    for weight in weights:
        if quantizer is not None and weight + weight_format.data.suffix in found.fields:
            for part in weight_format.parts:
                part_name = weight + part.suffix
                if part_name in found.fields:
                    hidden.discard(part_name)
                    view = field_view(files, weight, part, wanted[owners[weight]], found.fields[part_name])
                    if view is not None:
                        views[part_name] = view
        else:
            views[weight] = value_view(
                files, weight, weight_format, high_precision.stored[weight].shape, "F32" if float32 else name
            )
    return QuantizedFiles(
        declaration, files, ViewStore(files, views, hidden), found, tuple(weights), activations, quantizer, dtype, other
    )


def _storage(
    weight_format: WeightFormat, storage: str | None, any_storage: bool
) -> tuple[Quantizer | None, Quantizer | None]:
    """Return the form of the fields, and the one to make of them or of the values if that is another."""
    first = next(iter(weight_format.storages.values()), None)
    if storage == VALUES:
        return None, None
    if storage is None:
        return first, None
    if storage in weight_format.storages:
        return weight_format.storages[storage], None
    if storage in weight_format.then:
        return first, weight_format.then[storage]
    if any_storage and storage in FORMS:
        return None, FORMS[storage]
    exact = ", ".join((*weight_format.storages, *weight_format.then)) or "none"
    more = f"; with --allow-requantize {', '.join(FORMS)}"
    raise CheckpointError(f"{weight_format.name} cannot be stored as {storage!r}; allowed: {exact}{more}")


def quantized_weights(high_precision: Namespace, files: FileStore, weight_format: WeightFormat) -> list[str]:
    """Return which stored weights of a plain namespace the files hold in the format: those with a part of theirs."""
    tensors = files.tensors
    return [
        name
        for name, stored in high_precision.stored.items()
        if len(stored.shape) >= 2
        and (
            any(part.suffix and name + part.suffix in tensors for part in weight_format.parts)
            or (name in tensors and not weight_format.data.suffix and tensors[name].dtype in weight_format.data.dtypes)
        )
    ]


def _activations(
    files: FileStore, high_precision: Namespace, weights: list[str], weight_format: WeightFormat
) -> tuple[str, ...]:
    names = [scale_beside(weight, kind) for weight in weights for kind in weight_format.activations]
    if weight_format.attention:
        projections = (
            x.stored for x in high_precision.links if ".self_attention." in x.name and is_linear_weight(x.name)
        )
        modules = dict.fromkeys(name.rsplit(".", 2)[0] for name in projections)
        names += [f"{module}.{kind}" for module in modules for kind in weight_format.attention]
    return tuple(name for name in dict.fromkeys(names) if name in files.tensors)


def _match(
    files: FileStore,
    high_precision: Namespace,
    weights: list[str],
    weight_format: WeightFormat,
    where: str,
) -> None:
    """Check that the files have every tensor of the model and of every weight's parts, each as it must be."""
    quantized = set(weights)
    expected: dict[str, Stored] = {}
    for name, stored in high_precision.stored.items():
        if name not in quantized:
            expected[name] = stored
            continue
        if stored.shape[-1] % weight_format.columns:
            raise CheckpointError(
                f"{name!r} has {stored.shape[-1]} columns, which {weight_format.name} cannot have; allowed: a multiple "
                f"of {weight_format.columns}"
            )
        for part in weight_format.parts:
            allowed, found = part.shapes(stored.shape), files.tensors.get(name + part.suffix)
            shape = found.shape if found is not None and found.shape in allowed else allowed[0]
            expected[name + part.suffix] = Stored(shape, frozenset(part.dtypes), convertible=False)
    strangers = files.tensors.keys() - expected.keys()  # the model's own check sees them later
    match_tensors(files.tensors, expected, where=where, unused=strangers)


def _no_powers_of_two(
    files: FileStore, high_precision: Namespace, parameters: Collection[str], weight_format: WeightFormat
) -> set[str]:
    """Return the parameters of which a scale is not a power of two, be it promised, as in published files
    (`self_attn.o_proj` of DeepSeek-V3.1-Terminus), or not; this reads their scales."""
    part = weight_format.part("scale_inv") if parameters else None
    found: set[str] = set()
    for link in high_precision.links:
        if part is None or link.name not in parameters or link.name in found:
            continue
        name = link.stored + part.suffix
        if name in files.tensors and not all(numbers.is_power_of_two(s).all() for s in _scales(files, name)):
            found.add(link.name)
    return found


def main_float(files: FileStore, names: Iterable[str], high_precision: Namespace) -> str:
    """Return the dtype that most bytes of these plain tensors have; bfloat16 where there are none."""
    present = (
        files.tensors[name] for name in names if name in files.tensors and high_precision.stored[name].convertible
    )
    return with_most_bytes(((info.dtype, info.nbytes) for info in present if info.dtype in FLOATS), "BF16")


def _scales(files: FileStore, name: str) -> Iterator[torch.Tensor]:
    """Yield all scales of a tensor as float32, a part at a time."""
    for box in cut_rows(files.tensors[name].shape, 1 << 22):
        yield numbers.scale_to_float(files.read(name, box))


def _check_scale(files: FileStore, name: str, part: Part, *, pow2: bool) -> None:
    for box in cut_rows(files.tensors[name].shape, 1 << 22):
        stored = files.read(name, box)
        check_values(name, stored)
        scales = numbers.scale_to_float(stored)
        if pow2 and part.meaning == "scale" and not numbers.is_power_of_two(scales).all():
            raise CheckpointError(
                f"{name!r} has a scale that is not a power of two, as storage in mxfp8 needs; --storage float8_block "
                "takes it over, --allow-requantize quantizes it anew"
            )
