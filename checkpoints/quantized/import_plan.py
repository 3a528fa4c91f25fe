"""The plan of importing a quantized Hugging Face folder: its numbers where fields take them over, else as allowed."""

import contextlib
import functools
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from te_models.layers.quantizer import Float8CurrentScalingQuantizer, Quantizer
from te_models.sizes import plural

from ..folder.checkpoint import Checkpoint
from ..folder.te_plan import plan_te_folder
from ..formats.files import QuantizedFiles
from ..io.errors import CheckpointError
from ..mapping.param_shapes import ExpertLayout, expected_tensors
from ..mapping.plan import ConversionPlan, OutputTensor
from ..mapping.quantized_format import SUFFIXES, quantized_metadata, quantizer_from_metadata
from ..mapping.report import ConversionReport, Measure
from ..mapping.te_namespace import formats_in_layout, parameter_names
from .mxfp4_as_nvfp4 import SpanError, nvfp4_outputs
from .route import VALUES, Allowed, Route, StoredForm, choose_route
from .te_target import TETarget, value_outputs


def plan_quantized_import(
    ckpt: Checkpoint,
    values: Checkpoint | None,
    layout: ExpertLayout,
    dtype: torch.dtype | None,
    *,
    dequantize: bool,
) -> ConversionPlan:
    """Plan the import of `ckpt`, a quantized Hugging Face folder.

    values: the same folder opened as plain values; given them, what cannot be taken over may be requantized: weights
    whose blocks the joining of projections cuts, and the columnwise copies of formats that scale rows. None refuses the
    former and leaves out the latter: only training needs these.
    """
    quantized = ckpt.quantized
    assert quantized is not None, "called for quantized folders"
    logical = dtype or quantized.dtype
    forms = {name: quantizer_from_metadata(name, meta)[0] for name, meta in quantized.found.formats.items()}
    exact = {name: quantized_metadata(form, logical) for name, form in forms.items()}
    moved = plan_te_folder(ckpt, layout, exact, dtype)
    reencoded: dict[str, list[OutputTensor]] = {}
    inexact = dict(quantized.found.inexact)
    if quantized.wanted is not None:
        reencoded, spans = _as_nvfp4(ckpt, moved, layout, exact)
        inexact |= spans
    allowed: Allowed = ("requantize", "dequantize") if values is not None else ("dequantize",) if dequantize else ()

    def new(name: str) -> Quantizer:
        own = quantized.quantizer
        if len(quantized.format.formats) > 1 and own is not None:
            own = next(iter(quantized.parameters[name].storages.values()), None)
        return quantized.wanted or own or Float8CurrentScalingQuantizer()

    routes: dict[str, list[Route]] = {}
    for name in {**forms, **inexact}:
        form = new(name) if name in inexact else quantized.wanted or forms[name]
        form = form if values is None else form.with_usage(rowwise=True, columnwise=True)
        routes[name] = [
            choose_route(name, StoredForm(forms.get(name), inexact=inexact.get(name)), StoredForm(form), allowed)
        ]
        if routes[name][0].is_exact and len(form.stored_usages()) > 1:
            columnwise = form.with_usage(rowwise=False, columnwise=True)
            routes[name].append(choose_route(name, VALUES, StoredForm(columnwise)))
    _check_refused(ckpt, quantized, [route for route, *_ in routes.values() if route.way == "refuse"])
    target = TETarget(
        ckpt.config,
        layout,
        moved.outputs,
        ckpt.store if values is None else values.store,
        {} if values is None else value_outputs(values, layout),
        lambda name: logical,
        reencoded,
    )
    reporter = _Reporter(ckpt, quantized, reencoded, any(route.is_exact for route, *_ in routes.values()))
    outputs: list[OutputTensor] = []
    for name, weights in parameter_names(ckpt.config, layout).items():
        computed = [reporter.outputs(target, route) for route in routes.get(name, [Route(name, "move")])]
        outputs += [output for weight in weights for by_weight in computed for output in by_weight[weight]]
    outputs += [target.moved[name] for name in moved.passthrough]
    formats = {n: quantized_metadata(r.quantizer, logical) for n, (r, *_) in routes.items() if r.quantizer is not None}
    ignored = moved.ignored if quantized.quantizer is not None else (*moved.ignored, *quantized.activations)
    formats = formats_in_layout(ckpt.config, layout, formats)
    return replace(moved, outputs=tuple(outputs), ignored=ignored, formats=formats, report=reporter.report)


class _Reporter:
    """Reports what an import does to the numbers of each parameter."""

    def __init__(self, ckpt: Checkpoint, quantized: QuantizedFiles, reencoded: Collection[str], is_exact: bool) -> None:
        self.report = ConversionReport()
        self._tensors, self._quantized, self._reencoded = ckpt.files.tensors, quantized, reencoded
        self._factor_error = quantized.factor_error() if is_exact else 0.0
        self._weights = set(quantized.weights)

    def outputs(self, target: TETarget, route: Route) -> dict[str, list[OutputTensor]]:
        """Return what is written of a parameter, by weight, and report it."""
        if route.way == "requantize":
            return target.outputs(route, functools.partial(self._requantized, route))
        by_weight = target.outputs(route)
        for weight, outputs in by_weight.items():
            form = self._quantized.parameters.get(route.parameter)
            if route.quantizer is not None and form is not None:
                self._exact(weight, form.name, route.quantizer, outputs)
            else:
                self._plain("" if form is None else form.name, *outputs)
        return by_weight

    def _requantized(self, route: Route, weight: str) -> Measure:
        assert route.quantizer is not None, "it is requantized"
        what = " columnwise copy" if route.quantizer.stored_usages() == ("columnwise",) else ""
        name = self._quantized.parameters[route.parameter].name
        line = self.report.add(weight, "requantized", name, route.quantizer.FORMAT + what)
        return line.note

    def _exact(self, weight: str, name: str, quantizer: Quantizer, outputs: Iterable[OutputTensor]) -> None:
        sources = {piece.source for output in outputs for piece in output.pieces}
        as_stored = weight not in self._reencoded and all(map(self._quantized.store.can_read_bytes, sources))
        has_amax = "amax" in quantizer.PARTS
        error = 0.0 if as_stored or weight in self._reencoded or not has_amax else self._factor_error
        self.report.add_exact(weight, name, quantizer.FORMAT, encoded=not as_stored, error=error)

    def _plain(self, name: str, output: OutputTensor) -> None:
        sources = {piece.source for piece in output.pieces}
        if not sources.isdisjoint(self._weights):
            self.report.add(output.name, "dequantized", name, output.dtype)
        else:
            self.report.add_values(output.name, (self._tensors[source].dtype for source in sources), output.dtype)


def _check_refused(ckpt: Checkpoint, quantized: QuantizedFiles, refused: list[Route]) -> None:
    if refused:
        more = f" ({plural(len(refused), 'such parameter')})" if len(refused) > 1 else ""
        raise CheckpointError(
            f"{refused[0].parameter} cannot take over the numbers of {ckpt.path} ({quantized.format.name}) exactly: "
            f"{refused[0].why}{more}; {_other_storage(ckpt, quantized)}--allow-requantize quantizes such weights anew, "
            "--dequantize stores values"
        )


def _other_storage(ckpt: Checkpoint, quantized: QuantizedFiles) -> str:
    """Return, in words, the first other storage of the format that takes over all numbers of the folder, if there is
    one. This reads scales."""
    (form, *more) = quantized.format.formats
    for name, quantizer in form.storages.items() if not more else ():
        if quantizer != quantized.quantizer:
            with contextlib.suppress(CheckpointError), Checkpoint(ckpt.path, name) as other:
                other.check_scales()
                if other.quantized is not None and not other.quantized.found.inexact:
                    return f"--storage {name} takes all of them over, "
    return ""


def _as_nvfp4(
    ckpt: Checkpoint, moved: ConversionPlan, layout: ExpertLayout, formats: Collection[str]
) -> tuple[dict[str, list[OutputTensor]], dict[str, str]]:
    """Return the fields of parameters, by names in the layout, made of those that `moved` moves; and the parameters, by
    grouped names, for which that is not exact, with the reason."""
    by_name = {output.name: output for output in moved.outputs}
    shapes, names = expected_tensors(ckpt.config, layout), parameter_names(ckpt.config, layout)
    computed: dict[str, list[OutputTensor]] = {}
    inexact: dict[str, str] = {}
    for name in formats:
        for member in names[name]:
            fields = {s: by_name[member + s] for s in SUFFIXES.values() if member + s in by_name}
            try:
                computed[member] = nvfp4_outputs(ckpt.store, shapes[member], fields, member)
            except SpanError as error:
                inexact[name] = str(error)
                break
    return computed, inexact
