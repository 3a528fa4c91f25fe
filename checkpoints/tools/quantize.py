"""Store the weights of linear layers as a recipe quantizes them, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from te_models.layers import Recipe
from te_models.layers import recipe as recipe_by_name

from ..folder.checkpoint import Checkpoint, open_checkpoint
from ..folder.passthrough import our_names
from ..folder.provenance import source_of
from ..folder.te_folder import TEFolder
from ..io.dtypes import as_torch_dtype, dtype_name
from ..io.errors import CheckpointError
from ..io.finite_cast import check_decoded
from ..io.threads import Progress
from ..plan.param_shapes import is_linear_weight
from ..plan.parameters import Parameters
from ..plan.plan import Output, Plan, make_plan
from ..plan.quantized_format import describe
from ..plan.report import moved_report
from ..plan.te_namespace import formats_in_layout, te_namespace
from ..quantized.passthrough_values import carried_undeclared_as_values
from ..quantized.quantize_outputs import quantized_outputs, value_bands
from ..write.output_folder import write_conversion
from ..write.shards import MAX_SHARD_BYTES
from .convert import PathLike, refuse_quantized


def quantize(
    src: PathLike,
    dst: PathLike,
    recipe: Recipe | str,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    dry_run: bool = False,
    verify: bool = True,
) -> Plan:
    """Write a folder of ours in which the weights of linear layers are stored quantized.

    recipe: a recipe or its name (a key of RECIPES); its weight quantizer decides format and scales. The
    result is what quantizing the loaded weights gives, bit for bit; every expert has its own scales in both layouts.
    Memory is that of one usage's fields of one parameter and the quantizer's working copies of a few rows.
    """
    chosen = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    quantizer = chosen.weight_quantizer()
    with open_checkpoint(src, verify=verify) as ckpt:
        refuse_quantized(ckpt, "quantized again")
        layout = ckpt.layout or "grouped"
        plain = _plan_plain(ckpt)
        outputs: list[Output] = []
        formats = {}
        params = Parameters(ckpt.store, ckpt.namespace, ckpt.config, {}, layout)
        members = Parameters(ckpt.store, ckpt.namespace, ckpt.config, {}, "per-gemm")
        for output in plain.outputs:
            if output.name in plain.carried or not is_linear_weight(output.name):
                outputs.append(output)
                continue
            formats[output.name] = describe(quantizer, params.dtype(output.name))
            outputs += quantized_outputs(output.name, output.shape, formats[output.name], params, members)
        plan = replace(plain, outputs=tuple(outputs), formats=formats)
        plan = replace(plan, report=moved_report(plan, ckpt.tensors, "quantized"))
        return write_conversion(
            ckpt,
            Path(dst),
            plan,
            TEFolder(layout, ckpt.config, source_of(ckpt)).to_bytes(),
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
            dry_run=dry_run,
        )


def dequantize(
    src: PathLike,
    dst: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    dry_run: bool = False,
    verify: bool = True,
) -> Plan:
    """Write a folder of ours in which quantized weights are stored as values, in `dtype` or their logical dtype.

    Memory is that of the working copies of a few rows.
    """
    wanted = as_torch_dtype(dtype)
    with open_checkpoint(src, verify=verify) as ckpt:
        if ckpt.quantized is not None:
            raise CheckpointError(
                f"{src} is a Hugging Face folder; import it with --dequantize, which gives its values"
            )
        if not ckpt.formats or ckpt.layout is None:
            raise CheckpointError(f"{src} has no quantized weights")
        layout = ckpt.layout
        moved = make_plan(
            ckpt.tensors,
            ckpt.namespace,
            te_namespace(ckpt.config, layout, ckpt.formats),
            where=str(src),
            dtype=wanted,
            unused=ckpt.unused,
            carried=our_names(ckpt.carried),
        )
        params = Parameters(ckpt.store, ckpt.namespace, ckpt.config, ckpt.formats, layout)
        members = Parameters(ckpt.store, ckpt.namespace, ckpt.config, ckpt.formats, "per-gemm")
        formats = formats_in_layout(ckpt.config, layout, ckpt.formats)
        by_name = {output.name: output for output in moved.outputs}
        outputs = []
        for name, shape in params.shapes.items():
            if name in formats:
                logical = wanted or getattr(torch, formats[name]["logical_dtype"])
                compute = _dequantized(params, members, name, logical)
                outputs.append(Output(name, dtype_name(logical), shape, compute=compute))
            else:
                outputs.append(by_name[name])
        outputs += [by_name[name] for name in moved.carried]
        plan = replace(moved, outputs=tuple(outputs))
        plan = carried_undeclared_as_values(plan, ckpt.files, our_names(ckpt.carried), ckpt.source, wanted)
        plan = replace(plan, report=moved_report(plan, ckpt.tensors, "dequantized"))
        return write_conversion(
            ckpt,
            Path(dst),
            plan,
            TEFolder(layout, ckpt.config, ckpt.source and replace(ckpt.source, quantization=None)).to_bytes(),
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
            dry_run=dry_run,
        )


def _plan_plain(ckpt: Checkpoint) -> Plan:
    target = te_namespace(ckpt.config, ckpt.layout or "grouped")
    kept = our_names(ckpt.carried)
    return make_plan(ckpt.tensors, ckpt.namespace, target, where=str(ckpt.path), unused=ckpt.unused, carried=kept)


def _dequantized(
    params: Parameters, members: Parameters, name: str, dtype: torch.dtype
) -> Callable[[], Iterator[torch.Tensor]]:
    """Return the function that computes the values of one parameter, band after band."""

    def compute() -> Iterator[torch.Tensor]:
        for matrix, band in value_bands(params, members, name, dtype):
            yield check_decoded(band, matrix)

    return compute
