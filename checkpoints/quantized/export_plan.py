"""The plan of writing a quantized folder of ours in a quantized Hugging Face format: the import, read backwards.

The weight map in fields says which part of which field every tensor of the format is; where a format writes a number
differently (packed, in another dtype, its inverse) the part is encoded on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer

from ..folder.checkpoint import Checkpoint
from ..formats import Declaration, WeightFormat, format_fitting, format_named, hf_config_of, modelopt, parse
from ..formats.details import activation_scales
from ..formats.fp8 import FLOAT_BLOCKS, POW2_BLOCKS
from ..formats.namespace import FieldNamespace, field_namespace, upright
from ..formats.stacks import stacks
from ..io.errors import CheckpointError
from ..io.store import Store
from ..plan.parameters import Parameters
from ..plan.plan import Plan, make_plan
from ..plan.quantized_format import describe, quantizer_of
from ..plan.report import ConversionReport
from ..plan.te_namespace import te_namespace
from ..plan.tensor_map import Namespace
from .activation_scales import scale_outputs
from .dequantized_store import as_values
from .export_outputs import Encoder, add_moved, requantized_outputs, stacked_outputs, unequal_stacks
from .passthrough_values import carried_modules, carried_undeclared_as_values
from .representable import too_wide_parameters, uneven_parameters
from .shared_amax import JoinedAmaxes, matrix_keys


@dataclass(frozen=True)
class QuantizedExport:
    """A plan, what config.json says about quantization (None: nothing), and hf_quant_config.json (None: no such file).

    plain: the part of the plan that is not quantized. store: what the plan reads.
    """

    plan: Plan
    plain: Plan
    store: Store
    config: Mapping[str, Any] | None
    separate: Mapping[str, Any] | None


def plan_quantized_export(
    ckpt: Checkpoint,
    plain: Namespace,
    wanted: str | None,
    dtype: torch.dtype | None,
    carried: Mapping[str, str],
    copies: Mapping[str, str],
    *,
    allow_requantize: bool = False,
) -> QuantizedExport:
    """Plan the export of `ckpt`, a quantized folder of ours.

    Arguments:
        plain: how the family's files store the model in high precision.
        wanted: name of the format; None: the one it came from, or else the first that takes its weights.
        carried, copies: see `make_plan`.
        allow_requantize: quantize anew what the format cannot take over.
    """
    quantizers = {name: quantizer_of(name, meta)[0] for name, meta in ckpt.formats.items()}
    quantizers |= _promised(ckpt, quantizers)
    original, known = _original(ckpt), ckpt.source.quantization if ckpt.source is not None else None
    others = known is not None and known.get("others", False)
    weight_format, declaration = _choose(set(quantizers.values()), original, others, wanted, allow_requantize)
    weights = {link.stored for link in plain.links if link.name in quantizers}
    lying = [name for name in stacks(plain, weight_format) if name in weights]
    plain = upright(plain, weights)
    _check_columns(plain, weights, weight_format)
    anew = {name: "" for name, q in quantizers.items() if not (weight_format.takes(q) or weight_format.takes_even(q))}
    while True:
        moved = _move(ckpt, plain, weights, weight_format, quantizers, anew, dtype, carried, copies)
        uneven = moved.found.inexact or uneven_parameters(
            moved.store, moved.plan, moved.found, weight_format, quantizers
        )
        uneven = uneven or unequal_stacks(moved.store, moved.plan, moved.found, weight_format, lying)
        if allow_requantize and not uneven:
            uneven = too_wide_parameters(moved.store, moved.plan, moved.found, weight_format)
        if not uneven:
            break
        if not allow_requantize:
            name, why = next(iter(uneven.items()))
            raise CheckpointError(
                f"{name} of {ckpt.path} cannot be written as {weight_format.name}: {why}; choose another format, or "
                "--allow-requantize, or --dequantize"
            )
        anew |= uneven
    return _complete(ckpt, plain, weights, weight_format, declaration, quantizers, anew, moved, lying)


@dataclass(frozen=True)
class _Moved:
    """The plan that moves the fields of parameters which a format takes over, and all others as values; carried, dtype:
    those that it was made with."""

    plan: Plan
    carried: Mapping[str, str]
    dtype: torch.dtype | None
    found: FieldNamespace
    store: Store
    source: Namespace
    rowwise: Mapping[str, Mapping[str, Any]]


def _move(
    ckpt: Checkpoint,
    plain: Namespace,
    weights: set[str],
    weight_format: WeightFormat,
    quantizers: Mapping[str, Quantizer],
    anew: Mapping[str, str],
    dtype: torch.dtype | None,
    carried: Mapping[str, str],
    copies: Mapping[str, str],
) -> _Moved:
    logical = quantizer_of("", next(iter(ckpt.formats.values())))[1]
    kept = {name: quantizer for name, quantizer in quantizers.items() if name not in anew}
    found = field_namespace(plain, weights, weight_format, kept, logical, lambda a, b: True)
    store: Store = as_values(ckpt, [*anew, *found.inexact], torch.float32)
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
        carried=carried,
        copies=copies,
    )
    return _Moved(plan, carried, dtype, found, store, source, rowwise)


def _complete(
    ckpt: Checkpoint,
    plain: Namespace,
    weights: set[str],
    weight_format: WeightFormat,
    declaration: Declaration | None,
    quantizers: Mapping[str, Quantizer],
    anew: Mapping[str, str],
    moved: _Moved,
    lying: Sequence[str],
) -> QuantizedExport:
    """Return the export whose quantized weights are encoded from fields, or quantized from values (`anew`)."""
    found, store = moved.found, moved.store
    details = ckpt.source.quantization if declaration is not None and ckpt.source is not None else None
    exporter = Encoder(store, weight_format, found, quantizers, details or {})
    report = ConversionReport()
    params = Parameters(store, moved.source, ckpt.config, moved.rowwise, "grouped")
    by_weight = exporter.outputs(
        moved.plan, sorted(weights - {link.stored for link in plain.links if link.name in anew})
    )
    plain_by_name = {output.name: output for output in moved.plan.outputs}
    lines = {n: report.add(n, "requantized", str(ckpt.formats[n]["format"]), weight_format.name) for n in anew}
    joined, keys = JoinedAmaxes(weight_format.quantizer), matrix_keys(plain.links, anew)
    keys |= {weight: keys[weight][:1] * len(keys[weight]) for weight in lying if weight in keys}  # one number for all
    for link in plain.links:
        if link.name in anew and link.stored not in by_weight:
            by_weight[link.stored] = requantized_outputs(
                store,
                weight_format,
                plain_by_name[link.stored],
                exporter.shape,
                lambda: params.threads,
                lines[link.name].note,
                joined,
                keys[link.stored],
            )
    for weight in lying:
        by_weight[weight] = stacked_outputs(store, by_weight[weight], weight, weight_format)
    outputs = [output for weight in sorted(weights) for output in by_weight[weight]]
    left_out = moved.plan.ignored
    if details is None and ckpt.source is not None and ckpt.source.quantization is not None:
        left_out += tuple(activation_scales(ckpt.source.quantization))
    if details is not None:
        taken = {output.name for output in (*outputs, *moved.plan.outputs)}
        scales, unsaid = scale_outputs(ckpt, activation_scales(details), weight_format, plain, weights, taken)
        outputs += scales
        left_out += unsaid
    others = [o for o in moved.plan.outputs if o.name not in found.fields and o.name not in weights]
    plain_outputs = [output for output in others if output.name not in moved.plan.carried]
    outputs += [output for output in others if output.name in moved.plan.carried]
    add_moved(report, ckpt, found, weight_format, plain_outputs, exporter.encoded, exporter.imported, params.entry)
    plan = replace(moved.plan, outputs=(*plain_outputs, *outputs), ignored=left_out, report=report)
    if declaration is not None:
        config, separate = declaration.config, declaration.separate
    else:
        plan = carried_undeclared_as_values(plan, ckpt.files, moved.carried, ckpt.source, moved.dtype)
        config, separate = hf_config_of(weight_format, [*_plain_modules(plain, weights), *carried_modules(plan)])
        plan = replace(plan, notes=(*plan.notes, modelopt.UNCALIBRATED)) if weight_format == modelopt.FP8 else plan
    return QuantizedExport(
        plan,
        Plan(tuple(plain_outputs)),
        store,
        config,
        separate,
    )


def _original(ckpt: Checkpoint) -> Declaration | None:
    """Return what the folder that this one was imported from declared, if its weights are quantized since then."""
    if ckpt.source is None or ckpt.source.quantization is None:
        return None
    return parse(ckpt.source.config.get("quantization_config"), ckpt.source.quantization.get("separate"))


def _promised(ckpt: Checkpoint, quantizers: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """Return the forms that the original files promised, of parameters whose scales do not keep that promise."""
    details = ckpt.source.quantization if ckpt.source is not None else None
    unkept = details.get("unkept", []) if details is not None else []
    return {name: POW2_BLOCKS for name in unkept if quantizers.get(name) == FLOAT_BLOCKS}


def _choose(
    quantizers: set[Quantizer], original: Declaration | None, others: bool, wanted: str | None, allow_requantize: bool
) -> tuple[WeightFormat, Declaration | None]:
    """Return the format to write, and the original declaration if that says so of the same weights."""
    if original is not None and wanted in (None, original.format.name):
        taken = all(original.format.takes(q) or original.format.takes_even(q) for q in quantizers)
        if taken or (wanted is not None and allow_requantize and original.format.storages):
            return original.format, None if others else original
    if wanted is None:
        return format_fitting(quantizers), None
    return format_named(wanted, quantizers, allow_requantize=allow_requantize), None


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
