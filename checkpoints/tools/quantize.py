"""Store the weights of linear layers as a recipe quantizes them, and back."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack

import torch

from te_models.layers import Int4Quantizer, Int8Quantizer, Quantizer, Recipe
from te_models.layers import recipe as recipe_by_name

from ..folder.passthrough import our_names
from ..folder.provenance import provenance_source
from ..folder.te_plan import plan_te_folder
from ..formats.mx import MXFP4Quantizer
from ..io.dtypes import as_torch_dtype, check_decoded, torch_dtype
from ..io.errors import CheckpointError
from ..mapping.param_shapes import is_linear_weight
from ..mapping.plan import ConversionPlan, OutputTensor, make_plan
from ..mapping.quantized_format import Description, quantized_metadata
from ..mapping.report import moved_report
from ..mapping.te_namespace import parameter_names, te_namespace
from ..quantized.dequantized_store import ValueStore, as_values
from ..quantized.passthrough_values import undeclared_passthrough_as_values
from ..quantized.route import VALUES, StoredForm, choose_route
from ..quantized.te_target import TETarget
from .conversion import Conversion, ConversionKeywords, PathLike

WEIGHTS_ALONE: dict[str, Quantizer] = {
    "int4": Int4Quantizer(),
    "int8": Int8Quantizer(),
    "mxfp4": MXFP4Quantizer(columnwise=False),
}
"""What weights alone are stored as; MXFP4 in the storage of MXFP8, a format that holds all its values."""


def quantizer_named(name: str) -> Quantizer:
    """Return the quantizer of weights of a recipe's name, or of a name in WEIGHTS_ALONE."""
    return WEIGHTS_ALONE[name] if name in WEIGHTS_ALONE else recipe_by_name(name).weight_quantizer()


def quantize(
    src: PathLike,
    dst: PathLike,
    recipe: Recipe | Quantizer | str,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Write a folder of ours in which the weights of linear layers are stored quantized.

    recipe: a recipe or its name (a key of RECIPES), whose weight quantizer decides format and scales; or a quantizer of
    weights, or "int4" or "int8": integers with a scale in bfloat16 per 32 values, or "mxfp4", none of which a recipe
    computes in. The result is what quantizing the loaded weights gives, bit for bit; every expert has its own scales in
    both layouts. Memory holds one usage's fields of one parameter and the quantizer's working copies of a few rows.
    """
    if isinstance(recipe, str):
        recipe = quantizer_named(recipe)
    quantizer = recipe if isinstance(recipe, Quantizer) else recipe.weight_quantizer()
    with Conversion(src, dst, options) as conversion:
        conversion.refuse_quantized("quantized again")
        ckpt = conversion.ckpt
        layout = ckpt.layout or "grouped"
        high_precision = plan_te_folder(ckpt, layout)
        by_name = {output.name: output for output in high_precision.outputs}
        dtypes = {name: torch_dtype(output.dtype) for name, output in by_name.items()}
        target = TETarget(ckpt.config, layout, high_precision.outputs, ckpt.store, by_name, dtypes.__getitem__)
        outputs: list[OutputTensor] = []
        formats: dict[str, Description] = {}
        for name in parameter_names(ckpt.config, layout):
            route = choose_route(name, VALUES, StoredForm(quantizer) if is_linear_weight(name) else VALUES)
            for weight, written in target.outputs(route).items():
                outputs += written
                if route.quantizer is not None:
                    formats[weight] = quantized_metadata(route.quantizer, dtypes[weight])
        outputs += [by_name[name] for name in high_precision.passthrough]
        plan = replace(high_precision, outputs=tuple(outputs), formats=formats)
        plan = replace(plan, report=moved_report(plan, ckpt.tensors, "quantized"))
        return conversion.write_te_folder(plan, layout, provenance_source(ckpt))


def dequantize(
    src: PathLike,
    dst: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Write a te_models folder with the plain values of quantized weights, in `dtype` or their logical dtype.

    Memory holds working copies of a few rows. Raises CheckpointError for a folder that cannot be read.
    """
    wanted = as_torch_dtype(dtype)
    with Conversion(src, dst, options) as conversion:
        ckpt = conversion.ckpt
        if ckpt.quantized is not None:
            raise CheckpointError(
                f"{src} is a Hugging Face folder; import it with --dequantize, which gives its values"
            )
        if not ckpt.formats or ckpt.layout is None:
            raise CheckpointError(f"{src} has no quantized weights")
        layout = ckpt.layout
        high_precision = te_namespace(ckpt.config, layout)
        store = as_values(ckpt, ckpt.formats, wanted)
        moved = make_plan(
            store.tensors,
            high_precision,
            high_precision,
            where=str(src),
            dtype=wanted,
            unused=ckpt.unused,
            passthrough=our_names(ckpt.passthrough),
        )
        plan = replace(moved, outputs=tuple(_computed(store, output) for output in moved.outputs))
        plan = undeclared_passthrough_as_values(plan, ckpt.files, our_names(ckpt.passthrough), ckpt.source, wanted)
        plan = replace(plan, report=moved_report(plan, ckpt.tensors, "dequantized"))
        source = ckpt.source and replace(ckpt.source, quantization=None)
        return conversion.write_te_folder(plan, layout, source)


def _computed(store: ValueStore, output: OutputTensor) -> OutputTensor:
    """Return the output of a quantized parameter as one that is computed band after band; others as they are."""
    if output.name not in store.formats:
        return output

    def compute() -> Iterator[torch.Tensor]:
        return (check_decoded(band, output.name) for band in store.bands(output.name))

    return OutputTensor(output.name, output.dtype, output.shape, compute=compute)
