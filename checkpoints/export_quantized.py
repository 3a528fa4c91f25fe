"""The plan of writing a quantized folder of ours in a quantized Hugging Face format: the import, read backwards.

The weight map in fields says which part of which field every tensor of the format is; where a format writes a number
differently (packed, in another dtype, its inverse) the part is encoded on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer

from .boxes import Shape
from .checkpoint import Checkpoint
from .dtypes import dtype_name, torch_dtype
from .errors import CheckpointError
from .export_report import export_report
from .formats import Declaration, WeightFormat, encode, format_fitting, format_named, hf_config_of, parse
from .formats.details import activation_scales
from .formats.format import Part
from .formats.namespace import FieldNamespace, field_namespace, upright
from .formats.views import field_blocks
from .links import Namespace
from .move import cut_pieces, fill_tensor
from .parameters import Parameters
from .plan import Output, Plan, make_plan
from .quantized_format import SUFFIXES, describe, quantizer_of
from .store import Store
from .te_namespace import te_namespace

_BAND = 1 << 22


@dataclass(frozen=True)
class QuantizedExport:
    """A plan, what config.json says about quantization (None: nothing), and hf_quant_config.json (None: no such file).

    plain: the part of the plan that is not quantized.
    """

    plan: Plan
    plain: Plan
    config: Mapping[str, Any] | None
    separate: Mapping[str, Any] | None


def plan_quantized_export(
    ckpt: Checkpoint,
    plain: Namespace,
    wanted: str | None,
    dtype: torch.dtype | None,
    carried: Mapping[str, str],
) -> QuantizedExport:
    """Plan the export of `ckpt`, a quantized folder of ours.

    Arguments:
        plain: how the family's files store the model in high precision.
        wanted: name of the format; None: the one it came from, or else the first that takes its weights.
    """
    quantizers = {name: quantizer_of(name, meta)[0] for name, meta in ckpt.formats.items()}
    original = _original(ckpt)
    weight_format, declaration = _choose(set(quantizers.values()), original, wanted)
    weights = {link.stored for link in plain.links if link.name in quantizers}
    plain = upright(plain, weights)
    _check_columns(plain, weights, weight_format)
    logical = quantizer_of("", next(iter(ckpt.formats.values())))[1]
    found = field_namespace(plain, weights, weight_format, quantizers, logical, lambda a, b: True)
    if found.inexact:
        name, why = next(iter(found.inexact.items()))
        raise CheckpointError(
            f"{name} of {ckpt.path} cannot be written as {weight_format.name}: {why}; dequantize the folder first"
        )
    rowwise = {name: _rowwise(ckpt, name) for name in ckpt.formats}
    source = te_namespace(ckpt.config, ckpt.layout or "grouped", rowwise)
    copies = {name for name in ckpt.tensors if name not in source.stored and name in ckpt.namespace.stored}
    moved = make_plan(
        ckpt.tensors,
        source,
        found.namespace,
        where=str(ckpt.path),
        dtype=dtype,
        unused=ckpt.unused | copies,
        carried=carried,
    )
    details = ckpt.source.quantization if declaration is not None and ckpt.source is not None else None
    exporter = _Exporter(ckpt.store, weight_format, found, quantizers, details or {})
    outputs = exporter.outputs(moved, sorted(weights))
    left_out = moved.ignored
    if details is not None:
        scales, taken = activation_scales(details), {output.name for output in (*outputs, *moved.outputs)}
        kept = [name for name in scales if _is_of(name, weights) and name not in taken]
        outputs += [_constant(name, scales[name]) for name in kept]
        left_out += tuple(name for name in scales if name not in kept)
    plain_outputs = [o for o in moved.outputs if o.name not in found.fields and o.name not in moved.carried]
    outputs += [output for output in moved.outputs if output.name in moved.carried]
    amaxes = Parameters(ckpt.store, source, ckpt.config, rowwise, "grouped").entry
    report = export_report(ckpt, found, weight_format, plain_outputs, exporter.encoded, exporter.imported, amaxes)
    if declaration is not None:
        config, separate = declaration.config, declaration.separate
    else:
        config, separate = hf_config_of(weight_format, _plain_modules(plain, weights))
    return QuantizedExport(
        replace(moved, outputs=(*plain_outputs, *outputs), ignored=left_out, report=report),
        Plan(tuple(plain_outputs)),
        config,
        separate,
    )


def _original(ckpt: Checkpoint) -> Declaration | None:
    """Return what the folder that this one was imported from declared, if its weights are quantized since then."""
    if ckpt.source is None or ckpt.source.quantization is None:
        return None
    return parse(ckpt.source.config.get("quantization_config"), ckpt.source.quantization.get("separate"))


def _choose(
    quantizers: set[Quantizer], original: Declaration | None, wanted: str | None
) -> tuple[WeightFormat, Declaration | None]:
    """Return the format to write, and the original declaration if that is what it says."""
    if original is not None and wanted in (None, original.format.name):
        if all(map(original.format.takes, quantizers)):
            return original.format, original
        if wanted is None:
            return format_fitting(quantizers), None
    return (format_fitting(quantizers) if wanted is None else format_named(wanted, quantizers)), None


def _check_columns(plain: Namespace, weights: set[str], weight_format: WeightFormat) -> None:
    for name in sorted(weights):
        columns = plain.stored[name].shape[-1]
        if columns % weight_format.columns:
            raise CheckpointError(
                f"{name} has {columns} columns and cannot be written as {weight_format.name}, which needs a "
                f"multiple of {weight_format.columns}"
            )


def _rowwise(ckpt: Checkpoint, name: str) -> Mapping[str, Any]:
    quantizer, dtype = quantizer_of(name, ckpt.formats[name])
    return describe(quantizer.with_usage(rowwise=True, columnwise=quantizer.symmetric), dtype)


def _plain_modules(plain: Namespace, weights: set[str]) -> list[str]:
    """Return the modules with weight matrices that are not quantized, embeddings aside."""
    embeddings = {link.stored for link in plain.links if link.name.startswith("embedding.")}
    names = (n for n, s in plain.stored.items() if len(s.shape) >= 2 and n not in weights and n not in embeddings)
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


def _is_of(scale: str, weights: set[str]) -> bool:
    """Whether a scale of activations is beside one of these weights; in another form of a family there may be none."""
    module = scale.rpartition(".")[0]
    return module in weights or f"{module}.weight" in weights


def _constant(name: str, value: torch.Tensor) -> Output:
    return Output(name, dtype_name(value.dtype), tuple(value.shape), compute=lambda: [value])


class _Exporter:
    """The outputs of quantized weights, from the plan that moves their fields."""

    def __init__(
        self,
        store: Store,
        weight_format: WeightFormat,
        found: FieldNamespace,
        quantizers: Mapping[str, Quantizer],
        details: Mapping[str, Any],
    ) -> None:
        self._store, self._format, self._found, self._details = store, weight_format, found, details
        self.imported: Mapping[str, float] | None = details.get("numbers")
        self._quantizer = {link.stored: quantizers[name] for name, link in _owners(found, quantizers)}
        self.encoded: set[str] = set()

    def outputs(self, moved: Plan, weights: list[str]) -> list[Output]:
        """Return them weight by weight."""
        fields = {output.name: output for output in moved.outputs if output.name in self._found.fields}
        outputs = []
        for weight in weights:
            shape = self._shape(fields, weight)
            for part in self._format.parts:
                name = weight + part.suffix
                carrier = self._found.repeats.get(name, name)
                outputs.append(self._output(name, carrier, fields[carrier], part, shape))
        return outputs

    def _shape(self, fields: Mapping[str, Output], weight: str) -> Shape:
        data = fields[weight + self._format.data.suffix]
        packed = field_blocks(self._quantizer[data.name])["data"]
        assert packed is not None, "data has an entry per element or per pair"
        return (*data.shape[:-1], data.shape[-1] * packed[1])

    def _output(self, name: str, carrier: str, field: Output, part: Part, weight: Shape) -> Output:
        shapes = part.shapes(weight)
        one = self._details.get("ones", {}).get(part.suffix, part.one) if len(shapes) == 2 else False
        shape = shapes[1] if one else shapes[0]
        dtype = self._details.get("dtypes", {}).get(part.suffix, part.dtypes[0])
        block = field_blocks(self._quantizer[carrier])[part.field]
        repeat = 1 if part.block is None or block is None else max(1, block[0] // part.block[0])
        convert = encode.encoder(part, self._format.element, field.dtype, dtype, name, self.imported)
        if convert is None and (shape, dtype, repeat) == (field.shape, field.dtype, 1):
            return replace(field, name=name)
        self.encoded.add(name)
        compute = _encoded(self._store, field, convert, repeat, weight[-2])
        variant = f"{self._format.name} {part.suffix}"
        return Output(name, dtype, shape, field.pieces, compute, variant)


def _owners(found: FieldNamespace, quantizers: Mapping[str, Quantizer]) -> Iterator[tuple[str, Any]]:
    """Pairs (parameter, link) for every link of a field."""
    fields = {name + suffix: name for name in quantizers for suffix in SUFFIXES.values()}
    return ((fields[link.name], link) for link in found.namespace.links if link.name in fields)


def _encoded(
    store: Store, field: Output, convert: Callable[[torch.Tensor], torch.Tensor] | None, repeat: int, rows: int
) -> Callable[[], Iterator[torch.Tensor]]:
    """Return the function that reads a field band after band of its first dimension and encodes it."""

    def compute() -> Iterator[torch.Tensor]:
        first = field.shape[0] if field.shape else 1
        step = max(1, _BAND // max(1, math.prod(field.shape[1:])))
        for begin in range(0, first, step):
            end = min(first, begin + step)
            shape = (end - begin, *field.shape[1:]) if field.shape else ()
            band = torch.empty(shape, dtype=torch_dtype(field.dtype))
            pieces = list(cut_pieces(field.pieces, 0, begin, end)) if field.shape else field.pieces
            fill_tensor(store, pieces, band)
            if repeat > 1:
                stop = rows - begin * repeat if len(field.shape) == 2 else rows
                band = band.repeat_interleave(repeat, -2)[..., :stop, :]
            yield band if convert is None else convert(band)

    return compute
