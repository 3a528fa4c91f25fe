"""Quantized weights among the tensors that travel along, as values: for files that no longer declare their format.

The layers of DeepSeek-V3 that predict further tokens are quantized like the others, and one declaration holds for both.
So where a conversion writes another declaration or none, codes and scales of the old format would be read wrongly. Such
weights are then dequantized like the model's weights.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from ..folder.te_folder import HFSource
from ..formats import WeightFormat, parse
from ..formats.format import MixedFormat, scale_beside
from ..formats.fp8 import NamedScales, seen_scales
from ..formats.views import View, value_view
from ..io.boxes import Box, Range, Shape
from ..io.dtypes import check_decoded, dtype_name, torch_dtype
from ..io.store import FileStore
from ..mapping.plan import ConversionPlan, OutputTensor
from .row_blocks import BAND_ELEMENTS


def passthrough_as_values(
    plan: ConversionPlan,
    files: FileStore,
    passthrough: Mapping[str, str],
    declared: WeightFormat | MixedFormat,
    dtype: torch.dtype,
) -> ConversionPlan:
    """Return the plan with the passthrough weights that `files` hold in a format as values, and a note about those of
    its tensors that are no such weight.

    Arguments:
        passthrough: stored name -> the name of its copy; see `make_plan`.
        dtype: of the values.
    """
    scales_of_files = seen_scales(files, declared, passthrough)
    if scales_of_files:
        files, seen = NamedScales(files, scales_of_files), {stored: name for name, stored in scales_of_files.items()}
        passthrough = {seen.get(name, name): copy for name, copy in passthrough.items()}
    computed: dict[str, OutputTensor] = {}
    parts: set[str] = set()
    scales: list[str] = []
    for name in passthrough:
        weight_format = _format_of(name, files, declared)
        if weight_format is None:
            continue
        data = weight_format.data
        weight = name.removesuffix(data.suffix)
        shape = _weight_shape(files, weight, weight_format)
        if shape is None or any(weight + part.suffix not in passthrough for part in weight_format.parts):
            continue
        view = value_view(files, weight, weight_format, shape, dtype_name(dtype))
        copy = passthrough[name].removesuffix(data.suffix)
        computed[passthrough[name]] = OutputTensor(copy, view.dtype, shape, compute=_bands(view, weight))
        parts.update(passthrough[weight + part.suffix] for part in weight_format.parts)
        further = (weight + x.suffix for x in weight_format.beside)
        parts.update(passthrough[x] for x in further if x in passthrough)
        beside = (scale_beside(weight, kind) for kind in weight_format.activations)
        scales += [passthrough[scale] for scale in beside if scale in passthrough]
    gone = {*parts, *scales} - computed.keys()
    outputs = [computed.get(o.name, o) for o in plan.outputs if o.name not in gone]
    names = {old: output.name for old, output in computed.items()}
    remaining = tuple(names.get(name, name) for name in plan.passthrough if name not in gone)
    same = set(remaining) - computed.keys()
    left = [copy for name, copy in passthrough.items() if copy in same and files.tensors[name].dtype.startswith("F8_")]
    notes = (*plan.notes, _note(left, declared.name)) if left else plan.notes
    return replace(plan, outputs=tuple(outputs), passthrough=remaining, ignored=(*plan.ignored, *scales), notes=notes)


def undeclared_passthrough_as_values(
    plan: ConversionPlan,
    files: FileStore,
    passthrough: Mapping[str, str],
    source: HFSource | None,
    dtype: torch.dtype | None,
) -> ConversionPlan:
    """Return the plan of files that do not declare what those declared which `source` describes, with the
    passthrough weights in that format as values, in `dtype` or the dtype of the other weights."""
    if source is None or not passthrough:
        return plan
    separate = None if source.quantization is None else source.quantization["separate"]
    declaration = parse(source.config, separate)
    if declaration is None:
        return plan
    return passthrough_as_values(
        plan, files, passthrough, declaration.format, dtype or torch_dtype(source.dtype or "BF16")
    )


def passthrough_modules(plan: ConversionPlan) -> list[str]:
    """Return the modules with weight matrices among the passthrough tensors; a declaration names them as not
    quantized."""
    matrices = (o.name for o in plan.outputs if o.name in plan.passthrough and len(o.shape) >= 2)
    return [
        n.removesuffix(".weight") for n in matrices if n.endswith(".weight") and not n.endswith("embed_tokens.weight")
    ]


def _format_of(name: str, files: FileStore, declared: WeightFormat | MixedFormat) -> WeightFormat | None:
    """Return the format of the weight of which a tensor is the elements; None: it is not one."""
    for form in declared.formats:
        weight = name.removesuffix(form.data.suffix)
        fits = name.endswith(form.data.suffix) and files.tensors[name].dtype in form.data.dtypes
        if fits and declared.of(weight) == form:
            return form
    return None


def _weight_shape(files: FileStore, weight: str, weight_format: WeightFormat) -> Shape | None:
    """Return the shape [..., out, in] of a weight whose parts all are as the format says; None: they are not."""
    data = files.tensors[weight + weight_format.data.suffix]
    if weight_format.data.grouped is not None:
        *leading, groups, width = data.shape if len(data.shape) > 2 else (0, 0, 0)
        stored: Shape = (*leading, groups * width)
    else:
        stored = data.shape
    if len(stored) < 2 or weight_format.data.block is None:
        return None
    shape = (*stored[:-1], stored[-1] * weight_format.data.block[1])
    for part in weight_format.parts:
        info = files.tensors.get(weight + part.suffix)
        if info is None or info.dtype not in part.dtypes or info.shape not in part.shapes(shape):
            return None
    return shape


def _bands(view: View, name: str) -> Callable[[], Iterator[torch.Tensor]]:
    """Return what yields the values of a weight, matrix after matrix, a band of rows at a time."""
    *leading, rows, columns = view.shape
    step = max(1, BAND_ELEMENTS // max(1, columns))

    def compute() -> Iterator[torch.Tensor]:
        for place in itertools.product(*map(range, leading)):
            lead: Box = tuple(Range(i, i + 1) for i in place)
            for begin in range(0, rows, step):
                yield check_decoded(view.read((*lead, Range(begin, min(rows, begin + step)), Range(0, columns))), name)

    return compute


def _note(names: list[str], declared: str) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}, which the model does not use, stay in FP8, but are no weights in {declared}"
