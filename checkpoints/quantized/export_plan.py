"""The plan of writing a quantized folder of ours in a quantized Hugging Face format: the import, read backwards.

The weight map in fields says which part of which field every tensor of the format is; where a format writes a number
differently (packed, in another dtype, its inverse) the part is encoded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer
from te_models.sizes import plural

from ..families import FAMILIES
from ..folder.checkpoint import Checkpoint
from ..folder.provenance import with_bias_dtype
from ..formats import (
    Declaration,
    WeightFormat,
    format_named,
    hf_config_of,
    modelopt,
    parse,
    representing_format,
)
from ..formats.declaration import with_unquantized
from ..formats.details import ALL, activation_scales
from ..formats.format import MixedFormat
from ..formats.fp8 import FLOAT_BLOCKS, POW2_BLOCKS
from ..formats.namespace import FieldNamespace, field_namespace, upright
from ..formats.separate import IN_CONFIG
from ..formats.stacks import stacks
from ..io.errors import CheckpointError, shorten
from ..io.store import Store
from ..mapping.plan import ConversionPlan, OutputTensor, make_plan
from ..mapping.quantized_format import quantized_metadata, quantizer_from_metadata
from ..mapping.report import ConversionReport, Measure
from ..mapping.te_namespace import te_namespace
from ..mapping.tensor_map import Namespace
from .activation_scales import is_calibrated, scale_outputs
from .dequantized_store import as_values
from .file_target import FileTarget
from .passthrough_values import passthrough_modules, undeclared_passthrough_as_values
from .representable import unrepresentable
from .route import Route, StoredForm, choose_route


@dataclass(frozen=True)
class QuantizedExport:
    """A plan, the fields of config.json about quantization (None: none), and hf_quant_config.json (None: no such file).

    high_precision: the part of the plan that is not quantized. store: what the plan reads. format: of the others.
    """

    plan: ConversionPlan
    high_precision: ConversionPlan
    store: Store
    format: WeightFormat | MixedFormat
    config: Mapping[str, Any] | None
    separate: Mapping[str, Any] | None


def plan_quantized_export(
    ckpt: Checkpoint,
    high_precision: Namespace,
    wanted: str | None,
    dtype: torch.dtype | None,
    passthrough: Mapping[str, str],
    copies: Mapping[str, str],
    tied: Collection[str] = (),
    scales: str | None = None,
    *,
    allow_requantize: bool = False,
) -> QuantizedExport:
    """Plan the export of `ckpt`, a quantized folder of ours.

    Arguments:
        high_precision: how the family's files store the model in high precision.
        wanted: name of the format; None: the one it came from, or else the first that takes its weights.
        passthrough, copies: see `make_plan`.
        tied: weights of the family's modules that repeat another one; files need not hold them.
        scales: what files call scales of blocks that came from no such files; see `Names.scales`.
        allow_requantize: requantize what the format cannot take over.
    """
    quantizers = {name: quantizer_from_metadata(name, meta)[0] for name, meta in ckpt.formats.items()}
    quantizers |= _promised(ckpt, quantizers)
    original, known = _original(ckpt), ckpt.source.quantization if ckpt.source is not None else None
    others = known is not None and known.get("others", False)
    by_parameter = _original_formats(ckpt, original, quantizers)
    declared, declaration = _choose(quantizers, by_parameter, original, others, wanted, allow_requantize)
    if isinstance(declared, MixedFormat):
        formats_of = {name: by_parameter[name] for name in quantizers}
    else:
        formats_of = dict.fromkeys(quantizers, declared)
    formats = {link.stored: formats_of[link.name] for link in high_precision.links if link.name in quantizers}
    if declaration is not None and any(declared.of(weight) != form for weight, form in formats.items()):
        declaration = None  # other names than those that it gives formats to
    in_stacks = [name for name in stacks(high_precision, _each(formats)) if name in formats]
    high_precision = upright(high_precision, formats)
    _check_columns(high_precision, formats)
    _check_stacks(high_precision, in_stacks, formats)
    inexact = {name: "" for name, q in quantizers.items() if not _takes(formats_of[name], q)}
    while True:
        routes = _routes(quantizers, formats_of, inexact, allow_requantize=allow_requantize)
        refused = next((route for route in routes if route.way == "refuse"), None)
        if refused is not None:
            raise CheckpointError(
                f"{refused.parameter} of {ckpt.path} cannot be written as {formats_of[refused.parameter].name}: "
                f"{refused.why}; choose "
                "another format, or --allow-requantize, or --dequantize"
            )
        moved = _move(ckpt, high_precision, formats, quantizers, inexact, dtype, passthrough, copies)
        found = moved.found.inexact or unrepresentable(
            moved.store, moved.plan, moved.found, formats, quantizers, in_stacks, narrow=allow_requantize
        )
        if not found:
            break
        inexact |= found
    same_format = original is not None and declared is original.format
    details = known if same_format else None
    target = FileTarget(
        moved.plan.outputs,
        moved.store,
        formats,
        declared.formats,
        high_precision,
        moved.found,
        quantizers,
        in_stacks,
        {"scales": scales} if details is None else details,
    )
    report = ConversionReport()
    by_weight: dict[str, list[OutputTensor]] = {}
    for route in routes:
        by_weight |= target.outputs(route, _requantized(report, ckpt, route, formats_of))
    outputs = [output for weight in sorted(formats) for output in by_weight[weight]]
    left_out = moved.plan.ignored
    calibrated = False
    stale = () if details is None else details.get("stale", ())
    declaration = None if stale else declaration  # which promises scales of activations
    if details is not None:
        names = {output.name for output in (*outputs, *moved.plan.outputs)}
        of_activations, unsaid = scale_outputs(ckpt, activation_scales(details), formats, high_precision, names)
        calibrated = declaration is None and is_calibrated(formats, {output.name for output in of_activations})
        if declaration is not None or calibrated:
            outputs += of_activations
            left_out += unsaid
    if declaration is None and known is not None and not calibrated:  # what is declared instead has no such scales
        left_out += tuple(activation_scales(known))
    rest = [o for o in moved.plan.outputs if o.name not in moved.found.fields and o.name not in formats]
    high_precision_outputs = [output for output in rest if output.name not in moved.plan.passthrough]
    outputs += [output for output in rest if output.name in moved.plan.passthrough]
    _report_moved(report, ckpt, moved, target, formats_of, high_precision_outputs)
    plan = replace(moved.plan, outputs=(*high_precision_outputs, *outputs), ignored=left_out, report=report)
    if stale:
        plan = replace(plan, notes=(*plan.notes, _left_out_scales(stale)))
    if declaration is not None:
        config, separate = declaration.config, declaration.separate
    else:
        plan = undeclared_passthrough_as_values(plan, ckpt.files, passthrough, ckpt.source, dtype)
        others_named = [*_unquantized_modules(high_precision, set(formats), tied), *passthrough_modules(plan)]
        packed = isinstance(declared, WeightFormat) and declared.packing is not None
        if original is not None and (calibrated or packed):
            config, separate = with_unquantized(original, others_named)
        else:
            said, separate = hf_config_of(declared, others_named, formats)
            config = None if said is None else {IN_CONFIG: said}
            if declared == modelopt.FP8:
                plan = replace(plan, notes=(*plan.notes, modelopt.UNCALIBRATED))
    return QuantizedExport(plan, ConversionPlan(tuple(high_precision_outputs)), moved.store, declared, config, separate)


def _report_moved(
    report: ConversionReport,
    ckpt: Checkpoint,
    moved: _Moved,
    target: FileTarget,
    formats: Mapping[str, WeightFormat],
    high_precision: Iterable[OutputTensor],
) -> None:
    """Report what is taken over: quantized parameters, and the outputs in high precision."""
    for name in moved.found.formats:
        meta, encoded, error = ckpt.formats[name], name in target.reencoded, target.number_error(name)
        what = str(meta["format"]) + (" rowwise copy" if len(meta["usage"]) > 1 else "")
        report.add_exact(name, what, formats[name].name, encoded=encoded, error=error)
    owners = moved.found.owners
    for output in high_precision:
        name = owners.get(output.name, output.name)  # a copy of the embedding has none
        report.add_values(name, (ckpt.tensors[piece.source].dtype for piece in output.pieces), output.dtype)


def _left_out_scales(stale: Sequence[str]) -> str:
    which = "weights that nothing shows to be these" if ALL in stale else f"other values of {shorten(stale, 2)}"
    return f"scales of activations are left out: they were measured with {which}, and are to be calibrated again"


def _routes(
    quantizers: Mapping[str, Quantizer],
    formats: Mapping[str, WeightFormat],
    inexact: Mapping[str, str],
    *,
    allow_requantize: bool,
) -> list[Route]:
    """Return the routes of all quantized parameters: first of those that the format cannot take over."""
    order = (*inexact, *(name for name in quantizers if name not in inexact))
    allowed = ("requantize",) if allow_requantize else ()
    sources = {name: StoredForm(quantizer) for name, quantizer in quantizers.items()}
    targets = sources | {name: StoredForm(formats[name].quantizer, inexact=why) for name, why in inexact.items()}
    return [choose_route(name, sources[name], targets[name], allowed) for name in order]


def _takes(weight_format: WeightFormat, quantizer: Quantizer) -> bool:
    """Whether a format can have the numbers of a form of ours, with the scales of larger blocks if need be."""
    return weight_format.takes(quantizer) or weight_format.takes_even(quantizer)


@dataclass(frozen=True)
class _Moved:
    """The plan that moves the fields of parameters which a format takes over, and all others as values."""

    plan: ConversionPlan
    found: FieldNamespace
    store: Store


def _move(
    ckpt: Checkpoint,
    high_precision: Namespace,
    formats: Mapping[str, WeightFormat],
    quantizers: Mapping[str, Quantizer],
    inexact: Collection[str],
    dtype: torch.dtype | None,
    passthrough: Mapping[str, str],
    copies: Mapping[str, str],
) -> _Moved:
    logical = quantizer_from_metadata("", next(iter(ckpt.formats.values())))[1]
    representable = {name: quantizer for name, quantizer in quantizers.items() if name not in inexact}
    found = field_namespace(high_precision, formats, representable, logical, lambda a, b: True)
    store: Store = as_values(ckpt, [*inexact, *found.inexact], torch.float32)
    rowwise = {name: _rowwise(ckpt, name) for name in found.formats}
    source = te_namespace(ckpt.config, ckpt.layout or "grouped", rowwise)
    columnwise = {name for name in store.tensors if name not in source.stored and name in ckpt.namespace.stored}
    plan = make_plan(
        store.tensors,
        source,
        found.namespace,
        where=str(ckpt.path),
        dtype=dtype,
        unused=ckpt.unused | columnwise,
        passthrough=passthrough,
        copies=copies,
    )
    return _Moved(with_bias_dtype(plan, ckpt), found, store)


def _requantized(
    report: ConversionReport, ckpt: Checkpoint, route: Route, formats: Mapping[str, WeightFormat]
) -> Callable[[str], Measure] | None:
    """Report a parameter that is requantized; return what returns where the errors of its weights go."""
    if route.way != "requantize":
        return None
    source = str(ckpt.formats[route.parameter]["format"])
    line = report.add(route.parameter, "requantized", source, formats[route.parameter].name)
    return lambda weight: line.note


def _original(ckpt: Checkpoint) -> Declaration | None:
    """Return what the folder that this one was imported from declared, if its weights are quantized since then."""
    if ckpt.source is None or ckpt.source.quantization is None:
        return None
    return parse(ckpt.source.config, ckpt.source.quantization.get("separate"))


def _promised(ckpt: Checkpoint, quantizers: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """Return the forms that the original files promised, of parameters whose scales do not keep that promise."""
    details = ckpt.source.quantization if ckpt.source is not None else None
    unkept = details.get("unkept", []) if details is not None else []
    return {name: POW2_BLOCKS for name in unkept if quantizers.get(name) == FLOAT_BLOCKS}


def _original_formats(
    ckpt: Checkpoint, original: Declaration | None, quantizers: Mapping[str, Quantizer]
) -> dict[str, WeightFormat]:
    """Return the format that each parameter had in the folder that this one was imported from, where it had one."""
    if original is None or ckpt.source is None:
        return {}
    family = FAMILIES.get(ckpt.source.family or "")
    if family is None:
        return {}
    found: dict[str, WeightFormat] = {}
    for link in family.namespace(ckpt.config, ckpt.source.form).links:
        form = original.format.of(link.stored) if link.name in quantizers else None
        if form is not None:
            found[link.name] = form
    return found


def _each(formats: Mapping[str, WeightFormat]) -> MixedFormat:
    """Return these formats of weights as what a folder could declare."""
    names: dict[WeightFormat, set[str]] = {}
    for weight, form in formats.items():
        names.setdefault(form, set()).add(weight.removesuffix(".weight"))
    return MixedFormat(tuple((own.__contains__, form) for form, own in names.items()))


def _choose(
    by_name: Mapping[str, Quantizer],
    formats: Mapping[str, WeightFormat],
    original: Declaration | None,
    others: bool,
    wanted: str | None,
    allow_requantize: bool,
) -> tuple[WeightFormat | MixedFormat, Declaration | None]:
    """Return the format to write, and the original declaration if that says so of the same weights."""
    quantizers = {*by_name.values()}
    if original is not None and wanted in (None, original.format.name) and by_name.keys() <= formats.keys():
        exact = all(_takes(formats[name], q) for name, q in by_name.items())
        storable = all(form.storages for form in original.format.formats)
        if exact or (wanted is not None and allow_requantize and storable):
            return original.format, None if others else original
    if wanted is None:
        return representing_format(quantizers), None
    return format_named(wanted, quantizers, allow_requantize=allow_requantize), None


def _check_columns(high_precision: Namespace, formats: Mapping[str, WeightFormat]) -> None:
    for name, weight_format in sorted(formats.items(), key=lambda item: item[0]):
        columns = high_precision.stored[name].shape[-1]
        if columns % weight_format.columns:
            raise CheckpointError(
                f"{name} has {plural(columns, 'column')} and cannot be written as {weight_format.name}, which needs a "
                f"multiple of {weight_format.columns}"
            )


def _check_stacks(high_precision: Namespace, in_stacks: list[str], formats: Mapping[str, WeightFormat]) -> None:
    for name, weight_format in formats.items():
        packed = weight_format.packing is not None or weight_format.integers
        if packed and len(high_precision.stored[name].shape) > 2:
            raise CheckpointError(
                f"{name} is a stack of experts and cannot be written as {weight_format.name}, which has modules of one "
                "matrix; choose another format, or --form per-expert"
            )
        if name not in in_stacks or all(part.entries == "matrix" for part in weight_format.parts):
            continue
        raise CheckpointError(
            f"{name} is a stack of experts and cannot be written as {weight_format.name}, whose scales are "
            "the scales of one matrix; choose another format, or --form per-expert"
        )


def _rowwise(ckpt: Checkpoint, name: str) -> Mapping[str, Any]:
    quantizer, dtype = quantizer_from_metadata(name, ckpt.formats[name])
    return quantized_metadata(quantizer.with_usage(rowwise=True, columnwise=quantizer.symmetric), dtype)


def _unquantized_modules(high_precision: Namespace, weights: set[str], tied: Collection[str]) -> list[str]:
    """Return the modules with weight matrices that are not quantized, embeddings aside. Those whose weight is tied to
    the embedding's are among them: readers that go by the kind of a module quantize an output layer, stored or not."""
    embeddings = {link.stored for link in high_precision.links if link.name.startswith("embedding.")}
    names = [
        n for n, s in high_precision.stored.items() if len(s.shape) >= 2 and n not in weights and n not in embeddings
    ]
    return [name.removesuffix(".weight") for name in (*names, *tied) if name.endswith(".weight")]
