"""A folder of quantized files, opened: its tensors as fields of our storage where that is exact, else as values."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Int4Quantizer,
    Int8Quantizer,
    IntQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

from ..io.box_reads import cut_rows
from ..io.dtypes import FLOATS, torch_dtype, with_most_bytes
from ..io.errors import CheckpointError, UnreadError
from ..io.header import TensorInfo
from ..io.store import FileStore
from ..mapping.param_shapes import is_linear_weight
from ..mapping.plan import match_tensors
from ..mapping.tensor_map import Namespace, TensorSpec
from . import numbers
from .bitsandbytes import seen_as_values
from .files import QuantizedFiles
from .format import Declaration, MixedFormat, WeightFormat, scale_beside
from .fp8 import FLOAT_BLOCKS, POW2_BLOCKS, NamedScales, seen_scales
from .namespace import field_namespace, upright
from .packed_columns import seen_by_rows
from .separate import VALUES
from .stacks import seen_upright
from .views import View, ViewStore, field_view, value_view

FORMS: dict[str, Quantizer] = {
    "float8": Float8CurrentScalingQuantizer(),
    "float8_block": Float8BlockQuantizer(),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
    "int4": Int4Quantizer(),
    "int8": Int8Quantizer(),
}
"""Storages in which any format's values can be requantized."""
_NOT_LINEAR = "only the weights of linear layers are stored quantized"


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
    of FORMS. Of several formats each weight gets the first that is meant for it: None, VALUES and FORMS are allowed.
    float32: values are read as such, not in the dtype of the other weights.
    """
    declared = declaration.format
    files = seen_as_values(seen_by_rows(seen_upright(files, high_precision, declared), declared), declared)
    scales = seen_scales(files, declared, high_precision.stored)
    files = NamedScales(files, scales) if scales else files
    formats = quantized_weights(high_precision, files, declared)
    if not formats:
        raise CheckpointError(f"{where} declares the format {declared.name} and has no tensor in it")
    if isinstance(declared, WeightFormat) and declared.name == "fp8":
        for name in (n for n in formats if n in files.tensors and files.tensors[n].dtype == "I8"):
            raise CheckpointError(
                f"{name!r} holds FP4 values (I8), and config.json of {where} declares FP8 alone; it declares both with "
                "'expert_dtype': 'fp4'"
            )
    high_precision = upright(high_precision, formats)
    activations = _activations(files, high_precision, formats)
    _match(files, high_precision, formats, where)
    name = main_float(files, (n for n in high_precision.stored if n not in formats), high_precision)
    dtype = torch_dtype(name)
    forms = {form: _storage(form, storage, any_storage, mixed=len(declared.formats) > 1) for form in declared.formats}
    quantizer, other = forms[declared.formats[0]]
    owners = {link.stored: link.name for link in high_precision.links}
    parameters = {owners[weight]: form for weight, form in formats.items()}
    disordered = _disordered(files, high_precision, formats)
    own = {p: forms[form][0] for p, form in parameters.items() if is_linear_weight(p)}
    wanted = {p: form for p, form in own.items() if form is not None and p not in disordered}
    wanted, inexact_scales = _with_scales_of(files, high_precision, wanted)
    promised = {name for name, form in wanted.items() if form == POW2_BLOCKS}
    wanted |= dict.fromkeys(_no_powers_of_two(files, high_precision, promised, formats), FLOAT_BLOCKS)
    to_bytes = {name for name, form in wanted.items() if any_storage and form.FORMAT == "mxfp8"}
    requantized = _no_powers_of_two(files, high_precision, to_bytes, formats)
    wanted = {name: form for name, form in wanted.items() if name not in requantized}

    def same(a: str, b: str) -> bool:
        return torch.equal(files.view(a).flatten().float(), files.view(b).flatten().float())

    found = field_namespace(high_precision, formats, wanted, dtype, same)
    several = {name for name in found.inexact if wanted.get(name, FLOAT_BLOCKS) != FLOAT_BLOCKS}
    several = {name for name in several if FLOAT_BLOCKS in parameters[name].storages.values()}
    if storage is None and several:
        # one scale per matrix is exact in blocks that repeat it, where what a parameter joins has several
        reasons = found.inexact
        wanted |= dict.fromkeys(several, FLOAT_BLOCKS)
        found = field_namespace(high_precision, formats, wanted, dtype, same)
        found.inexact = {name: reasons[name] for name in found.inexact}
    found.inexact |= inexact_scales | (disordered if storage != VALUES else {})
    for parameter in sorted(parameters.keys() - {*wanted, *disordered, *inexact_scales}):
        form, instead = forms[parameters[parameter]]
        if form is not None:
            found.inexact[parameter] = _NOT_LINEAR
        elif storage is None or instead is not None:
            found.inexact[parameter] = "no form of ours has such scales"
    found.inexact |= dict.fromkeys(sorted(requantized), "it has a scale that is not a power of two")
    views: dict[str, View] = {}
    hidden = {*activations, *(weight + part.suffix for weight, form in formats.items() for part in form.parts)}
    hidden |= {weight + beside.suffix for weight, form in formats.items() for beside in form.beside}
    for weight, weight_format in formats.items():
        if weight + weight_format.data.suffix in found.fields:
            for part in weight_format.parts:
                part_name = weight + part.suffix
                if part_name in found.fields:
                    hidden.discard(part_name)
                    view = field_view(files, weight, part, wanted[owners[weight]], found.fields[part_name])
                    if view is not None:
                        views[part_name] = view
        else:
            shape = high_precision.stored[weight].shape
            views[weight] = value_view(files, weight, weight_format, shape, "F32" if float32 else name)
    store = ViewStore(files, views, hidden)
    return QuantizedFiles(
        declaration, files, store, found, formats, parameters, activations, quantizer, dtype, other, scales
    )


def logical_tensors(files: FileStore, declared: WeightFormat | MixedFormat) -> dict[str, TensorInfo]:
    """Return the tensors of files by name, of quantized weights their numbers, by the weights' names."""
    found = dict(seen_as_values(seen_by_rows(files, declared), declared).tensors)
    for suffix in {form.data.suffix for form in declared.formats} - {""}:
        found = {name.removesuffix(suffix): info for name, info in found.items()}
    return found


def _disordered(files: FileStore, high_precision: Namespace, formats: Mapping[str, WeightFormat]) -> dict[str, str]:
    """Return the parameters whose numbers no fields hold because of a tensor beside a weight -> why; this reads such
    tensors."""
    found: dict[str, str] = {}
    for link in high_precision.links:
        form = formats.get(link.stored)
        for beside in form.beside if form is not None else ():
            name = link.stored + beside.suffix
            if beside.otherwise is None or name not in files.tensors or link.name in found:
                continue
            try:
                stored = files.view(name).long()
            except UnreadError:
                continue  # a certificate from headers takes it for what the format declares
            if not torch.equal(stored, beside.value(high_precision.stored[link.stored].shape)):
                found[link.name] = beside.otherwise
    return found


def _with_scales_of(
    files: FileStore, high_precision: Namespace, wanted: Mapping[str, Quantizer]
) -> tuple[dict[str, Quantizer], dict[str, str]]:
    """Return the forms with the dtype that scales of integers have in files, and the parameters of which parts have
    several, with the reason that no form has them."""
    dtypes: dict[str, dict[str, str]] = {}
    for link in high_precision.links:
        if isinstance(wanted.get(link.name), IntQuantizer):
            info = files.tensors[f"{link.stored}_scale"]
            dtypes.setdefault(link.name, {})[info.dtype] = link.stored
    forms, several = dict(wanted), dict[str, str]()
    for name, by_dtype in dtypes.items():
        form = forms.pop(name)
        if len(by_dtype) > 1:
            several[name] = f"its parts have scales in {' and '.join(sorted(by_dtype))}"
        else:
            assert isinstance(form, IntQuantizer), "only such forms are looked at"
            forms[name] = replace(form, scale_dtype=torch_dtype(next(iter(by_dtype))))
    return forms, several


def _storage(
    weight_format: WeightFormat, storage: str | None, any_storage: bool, *, mixed: bool
) -> tuple[Quantizer | None, Quantizer | None]:
    """Return the form of the fields, and the one to make of them or of the values if that is another."""
    first = next(iter(weight_format.storages.values()), None)
    if storage == VALUES:
        return None, None
    if storage is None:
        return first, None
    if mixed and not (any_storage and storage in FORMS):
        raise CheckpointError(
            f"a folder of several formats cannot be stored as {storage!r}: each weight is stored in the first form "
            f"of its own; with --allow-requantize {', '.join(FORMS)}"
        )
    if storage in weight_format.storages and not mixed:
        return weight_format.storages[storage], None
    if storage in weight_format.then and not mixed:
        return first, weight_format.then[storage]
    if any_storage and storage in FORMS:
        return None, FORMS[storage]
    exact = ", ".join((*weight_format.storages, *weight_format.then)) or "none"
    more = f"; with --allow-requantize {', '.join(FORMS)}"
    raise CheckpointError(f"{weight_format.name} cannot be stored as {storage!r}; allowed: {exact}{more}")


def quantized_weights(
    high_precision: Namespace, files: FileStore, declared: WeightFormat | MixedFormat
) -> dict[str, WeightFormat]:
    """Return which stored weights of a plain namespace the files hold in a declared format, those with a part of
    theirs, each with its format."""
    tensors = files.tensors
    found: dict[str, WeightFormat] = {}
    for name, stored in high_precision.stored.items():
        form = declared.of(name) if len(stored.shape) >= 2 else None
        if form is not None and (
            any(part.suffix and name + part.suffix in tensors for part in form.parts)
            or (name in tensors and not form.data.suffix and tensors[name].dtype in form.data.dtypes)
        ):
            found[name] = form
    return found


def _activations(files: FileStore, high_precision: Namespace, formats: Mapping[str, WeightFormat]) -> tuple[str, ...]:
    names = [scale_beside(weight, kind) for weight, form in formats.items() for kind in form.activations]
    kinds = list(dict.fromkeys(kind for form in dict.fromkeys(formats.values()) for kind in form.attention))
    if kinds:
        projections = (
            x.stored for x in high_precision.links if ".self_attention." in x.name and is_linear_weight(x.name)
        )
        modules = dict.fromkeys(name.rsplit(".", 2)[0] for name in projections)
        names += [f"{module}.{kind}" for module in modules for kind in kinds]
    return tuple(name for name in dict.fromkeys(names) if name in files.tensors)


def _match(
    files: FileStore,
    high_precision: Namespace,
    formats: Mapping[str, WeightFormat],
    where: str,
) -> None:
    """Check that the files have every tensor of the model and of every weight's parts, each as it must be."""
    expected: dict[str, TensorSpec] = {}
    for name, stored in high_precision.stored.items():
        weight_format = formats.get(name)
        if weight_format is None:
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
            expected[name + part.suffix] = TensorSpec(shape, frozenset(part.dtypes), convertible=False)
        for beside in weight_format.beside:
            if beside.required or name + beside.suffix in files.tensors:
                shape = tuple(beside.value(stored.shape).shape)
                expected[name + beside.suffix] = TensorSpec(shape, frozenset(beside.dtypes), convertible=False)
    strangers = files.tensors.keys() - expected.keys()  # the model's own check sees them later
    match_tensors(files.tensors, expected, where=where, unused=strangers)


def _no_powers_of_two(
    files: FileStore, high_precision: Namespace, parameters: Collection[str], formats: Mapping[str, WeightFormat]
) -> set[str]:
    """Return the parameters of which a scale is not a power of two, be it promised, as in published files
    (`self_attn.o_proj` of DeepSeek-V3.1-Terminus), or not; this reads their scales."""
    found: set[str] = set()
    for link in high_precision.links:
        if link.name not in parameters or link.name in found or link.stored not in formats:
            continue
        name = link.stored + formats[link.stored].part("scale_inv").suffix
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
