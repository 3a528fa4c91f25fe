"""Conversions between folders. Each one plans from headers, refuses what it cannot do exactly, then streams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from te_models.lazy import torch

from ..families import Family
from ..families.base.moe_fields import left_out_loss
from ..families.base.names import Names
from ..families.base.text_part import text_family
from ..folder.checkpoint import Checkpoint, open_checkpoint
from ..folder.hf_config import choose_family, export_config, weight_dtype
from ..folder.passthrough import names_in_export, our_names
from ..folder.provenance import provenance_source, with_bias_dtype
from ..folder.special_tokens import GENERATION, generation_config, ids_to_add
from ..folder.te_plan import plan_te_folder
from ..folder.tied_weights import copies_in_export
from ..formats import SEPARATE, VALUES, with_quantization
from ..io.destination import check_destination
from ..io.dtypes import as_torch_dtype
from ..io.errors import CheckpointError
from ..io.strict_json import dump_object
from ..mapping.param_shapes import ExpertLayout, check_layout
from ..mapping.plan import ConversionPlan, make_plan
from ..mapping.report import moved_report
from ..mapping.te_namespace import formats_in_layout, grouped_formats, te_namespace
from .conversion import Conversion, ConversionKeywords, PathLike


def import_hf(
    src: PathLike,
    dst: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    layout: ExpertLayout = "grouped",
    storage: str | None = None,
    allow_requantize: bool = False,
    dequantize: bool = False,
    mtp: bool = False,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Convert a Hugging Face folder to a te_models folder. Quantized weights stay quantized, number for number.

    The fields of `te_models.checkpoints.tools.options.ImportOptions` say what the arguments mean.

    Raises CheckpointError, before anything is written, for a folder that cannot be read and for a conversion that
    cannot be exact without these options.
    """
    check_layout(layout)
    wanted = as_torch_dtype(dtype)
    # in float32, so that values are rounded once
    how = {"any_storage": allow_requantize, "float32": wanted is not None, "mtp": mtp}
    with ExitStack() as stack:
        conversion = stack.enter_context(
            Conversion(src, dst, options, storage=VALUES if dequantize else storage, **how)
        )
        ckpt = conversion.ckpt
        if ckpt.kind != "hf":
            raise CheckpointError(f"{src} is already a te_models folder; relayout changes its expert layout")
        if ckpt.quantized is not None:
            if dequantize and (allow_requantize or storage is not None):
                raise CheckpointError("dequantized weights are stored as values: choose no storage and no requantizing")
            ckpt.check_scales()
            values = None
            if allow_requantize:  # the same files once more, but checked once
                values = stack.enter_context(open_checkpoint(src, storage=VALUES, mtp=mtp, verify=False))
                values.check_elements()
            plan = plan_import(ckpt, layout, wanted, values=values, dequantize=dequantize)
        elif dequantize or allow_requantize or storage is not None:
            raise CheckpointError(
                f"{src} declares no quantization, so there is nothing to dequantize or to requantize; "
                "import it as it is, then te-models quantize stores its weights quantized"
            )
        else:
            plan = plan_import(ckpt, layout, wanted)
        source = provenance_source(ckpt, grouped_formats(ckpt.config, layout, plan.formats))
        return conversion.write_te_folder(plan, layout, source)


def plan_import(
    ckpt: Checkpoint,
    layout: ExpertLayout = "grouped",
    dtype: torch.dtype | None = None,
    *,
    values: Checkpoint | None = None,
    dequantize: bool = False,
) -> ConversionPlan:
    """Return the plan of the import of an open Hugging Face folder; arguments as for `import_hf`.

    values: the same folder, opened as values, from which weights are requantized; None: none are.
    """
    if ckpt.quantized is None:
        return plan_te_folder(ckpt, layout, dtype=dtype)
    from ..quantized.import_plan import plan_quantized_import
    from ..quantized.passthrough_values import passthrough_as_values

    plan = plan_quantized_import(ckpt, values, layout, dtype, dequantize=dequantize)
    if ckpt.formats:
        return plan
    # then the result does not say what was declared
    quantized, passthrough = ckpt.quantized, our_names(ckpt.passthrough)
    return passthrough_as_values(plan, ckpt.files, passthrough, quantized.format, dtype or quantized.dtype)


def export_hf(
    src: PathLike,
    dst: PathLike,
    *,
    family: str | None = None,
    form: str | None = None,
    recipe: str | None = None,
    format: str | None = None,
    allow_requantize: bool = False,
    dequantize: bool = False,
    dtype: torch.dtype | str | None = None,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Convert a te_models folder to a Hugging Face folder that transformers loads. Quantized weights stay quantized.

    The fields of `te_models.checkpoints.tools.options.ExportOptions` say what the arguments mean.
    format: a key of `formats.WRITABLE`. With a recipe the quantized weights lie beside the result until that is there.

    Raises CheckpointError, before anything is written, for a folder that cannot be read, a model that the family cannot
    express, and weights that the format cannot represent.
    """
    if recipe is not None:
        choices = {"family": family, "form": form, "format": format, "allow_requantize": allow_requantize}
        with _stored_quantized(src, dst, recipe, options, dequantize=dequantize) as quantized:
            return export_hf(quantized, dst, **choices, dtype=dtype, **options)
    with Conversion(src, dst, options) as conversion:
        ckpt = conversion.ckpt
        if ckpt.kind != "te_models":
            otherwise = f"to write it otherwise, te-models import {src} DIR, then export DIR"
            raise CheckpointError(f"{src} is already a Hugging Face folder; {otherwise}")
        _check_choice(ckpt, format, allow_requantize=allow_requantize, dequantize=dequantize)
        target = choose_family(ckpt.config, ckpt.source, family)
        target.write_config(ckpt.config)  # raises if the family cannot express the model
        if form is None and ckpt.source is not None and ckpt.source.family == target.model_type:
            form = ckpt.source.form
        namespace = target.namespace(ckpt.config, form)
        hf = {} if ckpt.source is None else ckpt.source.config
        passthrough = names_in_export(ckpt.passthrough, hf, target, namespace.stored)
        copies = copies_in_export(ckpt.config, ckpt.source, target, form)
        names = target.names if form is None else target.forms[form]
        wanted, extra, store, formats = as_torch_dtype(dtype), {}, ckpt.store, None
        if ckpt.formats and not dequantize:
            from ..formats import transformers_note
            from ..quantized.export_plan import plan_quantized_export

            export = plan_quantized_export(
                ckpt,
                namespace,
                format,
                wanted,
                passthrough,
                copies,
                names.tied_output(ckpt.config),
                names.scales,
                allow_requantize=allow_requantize,
            )
            plan, store = export.plan, export.store
            note = transformers_note(export.format, target.model_type, experts=ckpt.config.moe is not None)
            plan = plan if note is None else replace(plan, notes=(*plan.notes, note))
            config = export_config(ckpt.config, ckpt.source, target, weight_dtype(export.high_precision, copies))
            if export.config is not None:
                config = with_quantization(config, export.config)
            if export.separate is not None:
                extra[SEPARATE] = dump_object(dict(export.separate))
        else:
            if ckpt.formats:
                from ..quantized.dequantized_store import as_values

                store = as_values(ckpt, ckpt.formats)
                formats = store.formats
            plan = make_plan(
                store.tensors,
                te_namespace(ckpt.config, ckpt.layout or "grouped"),
                namespace,
                where=str(src),
                dtype=wanted,
                unused=ckpt.unused,
                passthrough=passthrough,
                copies=copies,
            )
            plan = with_bias_dtype(plan, ckpt)
            if passthrough:
                from ..quantized.passthrough_values import undeclared_passthrough_as_values

                plan = undeclared_passthrough_as_values(plan, ckpt.files, passthrough, ckpt.source, wanted)
            plan = replace(plan, report=moved_report(plan, store.tensors, "dequantized", formats))
            config = export_config(ckpt.config, ckpt.source, target, weight_dtype(plan, copies))
        plan = replace(plan, notes=(*plan.notes, *_notes_of(ckpt, target, names)))
        ids = ids_to_add(ckpt.path, ckpt.config.vocab_size)
        if ids:
            # a pad_token_id of config.json would take the gradient of that row of the embedding away
            config |= {name: id for name, id in ids.items() if name != "pad_token_id"}
            extra[GENERATION] = dump_object(generation_config(ckpt.path, ids))
            written = ", ".join(f"{name} = {id}" for name, id in ids.items())
            plan = replace(plan, notes=(*plan.notes, f"{GENERATION} gets what the tokenizer alone said: {written}"))
        return conversion.write(plan, dump_object(config), store=store, extra=extra)


def _notes_of(ckpt: Checkpoint, target: Family, names: Names) -> Iterator[str]:
    """Say what transformers does not make of an export in this family and form."""
    loss = left_out_loss(ckpt.config, text_family(target, ckpt.config).known)
    if loss is not None:
        yield loss
    if not names.loadable:
        yield f"transformers does not load the form {names.form!r} of {target.model_type}; it loads --form published"


def relayout(
    src: PathLike,
    dst: PathLike,
    layout: ExpertLayout,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Convert a te_models folder to another expert layout, bit for bit; quantized weights stay quantized.

    layout: "grouped" (one tensor [E, out, in] per projection) or "per-gemm" (one tensor [out, in] per expert). Raises
    CheckpointError for a Hugging Face folder and for a folder that cannot be read.
    """
    check_layout(layout)
    with Conversion(src, dst, options) as conversion:
        ckpt = conversion.ckpt
        if ckpt.kind != "te_models":
            raise CheckpointError(f"{src} is a Hugging Face folder; import it, with the layout that you want")
        plan = plan_te_folder(ckpt, layout, ckpt.formats)
        plan = replace(plan, formats=formats_in_layout(ckpt.config, layout, ckpt.formats))
        return conversion.write_te_folder(plan, layout, ckpt.source)


@contextmanager
def _stored_quantized(
    src: PathLike, dst: PathLike, recipe: str, options: ConversionKeywords, *, dequantize: bool
) -> Iterator[Path]:
    """Yield a folder beside `dst`, for as long as it is needed, with the linear weights of `src` quantized."""
    from .quantize import quantize

    if dequantize:
        raise CheckpointError(f"recipe is {recipe!r}; allowed with dequantize: no recipe")
    out = Path(dst)
    check_destination(out, overwrite=options.get("overwrite", False))
    between = out.with_name(f".{out.name}.quantized")
    read = {"overwrite": True, "verify": options.get("verify", True), "progress": options.get("progress")}
    try:
        quantize(src, between, recipe, **read)
        yield between
    except CheckpointError as error:  # of the folder that the caller named
        raise CheckpointError(str(error).replace(str(between), str(src))) from None
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _check_choice(ckpt: Checkpoint, format: str | None, *, allow_requantize: bool, dequantize: bool) -> None:
    """Raise CheckpointError for options of an export that contradict the folder or each other."""
    if not ckpt.formats and (format is not None or allow_requantize or dequantize):
        as_what = "dequantize" if dequantize else "requantize" if format is None else f"write as {format}"
        first = "" if dequantize else ", or name a recipe (--recipe)"
        raise CheckpointError(f"{ckpt.path} has no quantized weights to {as_what}; quantize it first{first}")
    if dequantize and (allow_requantize or format is not None):
        raise CheckpointError("dequantized weights are written as values: choose no format and no requantizing")
