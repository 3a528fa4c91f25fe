"""The plan of importing a quantized Hugging Face folder: its numbers where fields take them over, else as allowed."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from te_models.layers.quantizer import Float8CurrentScalingQuantizer, Quantizer

from ..folder.checkpoint import Checkpoint
from ..folder.passthrough import our_names
from ..formats.source import QuantizedFiles
from ..io.boxes import Shape
from ..io.errors import CheckpointError
from ..plan.param_shapes import ExpertLayout, expected_tensors, is_linear_weight
from ..plan.parameters import Parameters
from ..plan.plan import Output, Plan, make_plan
from ..plan.quantized_format import SUFFIXES, Description, describe, quantizer_of
from ..plan.report import ConversionReport, Kind
from ..plan.te_namespace import formats_in_layout, te_namespace
from .mxfp4_as_nvfp4 import SpanError, nvfp4_outputs
from .quantize_outputs import quantized_outputs


def plan_quantized_import(
    ckpt: Checkpoint,
    values: Checkpoint | None,
    layout: ExpertLayout,
    dtype: torch.dtype | None,
    *,
    dequantize: bool,
) -> Plan:
    """Plan the import of `ckpt`, a quantized Hugging Face folder.

    values: the same folder opened as plain values, which allows to quantize anew what cannot be taken over: weights
    whose blocks the joining of projections cuts, and the columnwise copies of formats that scale rows. None refuses
    the former and leaves out the latter, which only training needs.
    """
    quantized = ckpt.quantized
    assert quantized is not None, "called for quantized folders"
    logical = dtype or quantized.dtype
    exact = {name: describe(quantizer_of(name, meta)[0], logical) for name, meta in quantized.found.formats.items()}
    moved = make_plan(
        ckpt.tensors,
        ckpt.namespace,
        te_namespace(ckpt.config, layout, exact),
        where=str(ckpt.path),
        dtype=dtype,
        unused=ckpt.unused,
        carried=our_names(ckpt.carried),
    )
    made: dict[str, list[Output]] = {}
    inexact = dict(quantized.found.inexact)
    if quantized.wanted is not None and exact:
        made, spans = _as_nvfp4(ckpt, moved, layout, exact)
        inexact |= spans
    anew = {name: why for name, why in inexact.items() if values is not None and is_linear_weight(name)}
    refused = {name: why for name, why in inexact.items() if name not in anew}
    if refused and values is None and not dequantize:
        name, why = next(iter(refused.items()))
        more = f" ({len(refused)} such parameters)" if len(refused) > 1 else ""
        raise CheckpointError(
            f"{name} cannot take over the numbers of {ckpt.path} ({quantized.format.name}) exactly: {why}{more}; "
            f"{_other_storage(ckpt, quantized)}--allow-requantize quantizes such weights anew, "
            "--dequantize stores values"
        )
    exact = {name: meta for name, meta in exact.items() if name not in inexact}
    if quantized.wanted is not None:
        exact = {name: describe(quantized.wanted, logical) for name in exact}
    formats = exact
    if values is not None:
        formats = {name: describe(_with_copies(quantizer_of(name, m)[0]), logical) for name, m in exact.items()}
        formats |= {name: describe(_nearest(quantized), logical) for name in anew}
    importer = _Importer(ckpt, quantized, values, layout, formats, set(exact), made)
    outputs = importer.outputs(moved)
    stored_formats = formats_in_layout(ckpt.config, layout, formats)
    ignored = moved.ignored if quantized.quantizer is not None else (*moved.ignored, *quantized.activations)
    return replace(moved, outputs=outputs, ignored=ignored, formats=stored_formats, report=importer.report)


class _Importer:
    """The outputs of an import, parameter by parameter, and the report about them."""

    def __init__(
        self,
        ckpt: Checkpoint,
        quantized: QuantizedFiles,
        values: Checkpoint | None,
        layout: ExpertLayout,
        formats: dict[str, Description],
        exact: set[str],
        made: dict[str, list[Output]],
    ) -> None:
        self.report = ConversionReport()
        self._ckpt, self._quantized = ckpt, quantized
        self._layout: ExpertLayout = layout
        self._made = made
        self._formats = formats_in_layout(ckpt.config, layout, formats)
        self._exact = set(formats_in_layout(ckpt.config, layout, {name: formats[name] for name in exact}))
        self._factor_error = quantized.factor_error() if exact else 0.0
        self._values: tuple[Parameters, Parameters] | None = None
        if values is not None:
            layouts: tuple[ExpertLayout, ...] = (layout, "per-gemm")
            a, b = (Parameters(values.store, values.namespace, ckpt.config, {}, x) for x in layouts)
            self._values = a, b

    def outputs(self, moved: Plan) -> tuple[Output, ...]:
        """Return them in order: moved where numbers are taken over, computed where they are not."""
        by_name = {output.name: output for output in moved.outputs}
        outputs: list[Output] = []
        for name, shape in expected_tensors(self._ckpt.config, self._layout).items():
            if name in self._exact:
                fields = {s: by_name[name + s] for s in SUFFIXES.values() if name + s in by_name}
                outputs += self._taken(name, shape, fields)
            elif name in self._formats:
                outputs += self._anew(name, shape, self._formats[name])
            else:
                outputs.append(self._plain(by_name[name]))
        outputs += [by_name[name] for name in moved.carried]
        return tuple(outputs)

    def _taken(self, name: str, shape: Shape, fields: dict[str, Output]) -> list[Output]:
        meta, source = self._formats[name], self._quantized.format.name
        kind: Kind = "exact"
        if name in self._made:
            kind = "re-encoded exact"
        elif any(
            not self._quantized.store.can_read_bytes(p.source) for output in fields.values() for p in output.pieces
        ):
            kind = "re-encoded" if self._factor_error else "re-encoded exact"
        line = self.report.add(name, kind, source, meta["format"])
        if kind == "re-encoded":
            line.relative = True
            line.note(self._factor_error)
        taken = self._made.get(name, list(fields.values()))
        quantizer = quantizer_of(name, meta)[0]
        if len(quantizer.stored_usages()) == 1:
            return taken
        columnwise = describe(quantizer.with_usage(rowwise=False, columnwise=True), quantizer_of(name, meta)[1])
        return [*taken, *self._anew(name, shape, columnwise, " columnwise copy")]

    def _anew(self, name: str, shape: Shape, meta: Description, what: str = "") -> list[Output]:
        assert self._values is not None, "quantizing anew has been allowed"
        line = self.report.add(name, "requantized", self._quantized.format.name, meta["format"] + what)
        return quantized_outputs(name, shape, meta, *self._values, line.note)

    def _plain(self, output: Output) -> Output:
        weights = set(self._quantized.weights)
        if any(piece.source in weights for piece in output.pieces):
            self.report.add(output.name, "dequantized", self._quantized.format.name, output.dtype)
        else:
            found = " and ".join(sorted({self._ckpt.files.tensors[piece.source].dtype for piece in output.pieces}))
            self.report.add(output.name, "exact" if found == output.dtype else "converted", found, output.dtype)
        return output


def _other_storage(ckpt: Checkpoint, quantized: QuantizedFiles) -> str:
    """Return, in words, the first other storage of the format that takes over all numbers of the folder, if there is
    one. This reads scales."""
    for name, quantizer in quantized.format.storages.items():
        if quantizer != quantized.quantizer:
            with contextlib.suppress(CheckpointError), Checkpoint(ckpt.path, name) as other:
                other.check_scales()
                if other.quantized is not None and not other.quantized.found.inexact:
                    return f"--storage {name} takes all of them over, "
    return ""


def _as_nvfp4(
    ckpt: Checkpoint, moved: Plan, layout: ExpertLayout, formats: dict[str, Description]
) -> tuple[dict[str, list[Output]], dict[str, str]]:
    """Return the fields of parameters, by names in the layout, made of those that `moved` moves; and the parameters, by
    grouped names, for which that is not exact, with the reason."""
    by_name = {output.name: output for output in moved.outputs}
    shapes = expected_tensors(ckpt.config, layout)
    made: dict[str, list[Output]] = {}
    inexact: dict[str, str] = {}
    for name, meta in formats.items():
        for member in formats_in_layout(ckpt.config, layout, {name: meta}):
            fields = {s: by_name[member + s] for s in SUFFIXES.values() if member + s in by_name}
            try:
                made[member] = nvfp4_outputs(ckpt.store, shapes[member], fields, member)
            except SpanError as error:
                inexact[name] = str(error)
                break
    return made, inexact


def _nearest(quantized: QuantizedFiles) -> Quantizer:
    """Return the form in which weights are quantized anew: that of the others, or one scale per matrix."""
    return _with_copies(quantized.wanted or quantized.quantizer or Float8CurrentScalingQuantizer())


def _with_copies(quantizer: Quantizer) -> Quantizer:
    return quantizer.with_usage(rowwise=True, columnwise=True)
