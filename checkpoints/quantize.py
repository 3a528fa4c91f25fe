"""Store the weights of linear layers as a recipe quantizes them, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from te_models.layers import GroupedTensor, QuantizedTensor, Recipe
from te_models.layers import recipe as recipe_by_name
from te_models.layers.quantizer import Quantizer

from .boxes import Shape
from .checkpoint import Checkpoint, open_checkpoint
from .convert import PathLike, refuse_quantized, source_of
from .dtypes import as_torch_dtype, dtype_name
from .errors import CheckpointError
from .output_folder import write_conversion
from .parameters import Parameters
from .plan import Output, Plan, make_plan
from .quantized_format import describe, field_specs, stored_fields
from .te_folder import TEFolder
from .te_namespace import formats_in_layout, te_namespace
from .writer import MAX_SHARD_BYTES, Progress


def is_linear_weight(name: str) -> bool:
    """Whether a parameter is the weight of a linear layer that runs under a recipe (a router is not)."""
    return ".linear_" in name and name.rpartition(".")[2].startswith("weight")


def quantize(
    src: PathLike,
    dst: PathLike,
    recipe: Recipe | str,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Plan:
    """Write a folder of ours in which the weights of linear layers are stored quantized.

    recipe: a recipe or its name ("current", "block", "mxfp8"); its weight quantizer decides format and scales. The
    result is what quantizing the loaded weights gives, bit for bit; every expert has its own scales in both layouts.
    Memory is that of one output tensor and the quantizer's float32 working copies of one matrix.
    """
    chosen = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    quantizer = chosen.weight_quantizer()
    with open_checkpoint(src) as ckpt:
        refuse_quantized(ckpt, "quantized again")
        layout = ckpt.layout or "grouped"
        plain = _plan_plain(ckpt)
        outputs: list[Output] = []
        formats = {}
        params = Parameters(ckpt.store, ckpt.namespace, ckpt.config, {}, layout)
        members = Parameters(ckpt.store, ckpt.namespace, ckpt.config, {}, "per-gemm")
        for output in plain.outputs:
            if not is_linear_weight(output.name):
                outputs.append(output)
                continue
            meta = describe(quantizer, params.dtype(output.name))
            formats[output.name] = meta
            make = _Fields(output.name, output.shape, quantizer, params, members)
            for suffix, spec in field_specs(output.name, output.shape, meta).items():
                entry = output.name + suffix
                (dtype,) = spec.dtypes
                outputs.append(Output(entry, dtype, spec.shape, compute=make.entry(entry)))
        plan = Plan(tuple(outputs), plain.ignored, formats)
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
) -> Plan:
    """Write a folder of ours in which quantized weights are stored as values, in `dtype` or their logical dtype."""
    wanted = as_torch_dtype(dtype)
    with open_checkpoint(src) as ckpt:
        if not ckpt.formats or ckpt.layout is None:
            raise CheckpointError(f"{src} has no quantized weights")
        layout = ckpt.layout
        moved = make_plan(
            ckpt.tensors, ckpt.namespace, te_namespace(ckpt.config, layout, ckpt.formats), where=str(src), dtype=wanted
        )
        params = Parameters(ckpt.store, ckpt.namespace, ckpt.config, ckpt.formats, layout)
        formats = formats_in_layout(ckpt.config, layout, ckpt.formats)
        by_name = {output.name: output for output in moved.outputs}
        outputs = []
        for name, shape in params.shapes.items():
            if name in formats:
                logical = wanted or getattr(torch, formats[name]["logical_dtype"])
                compute = _dequantized(params, name, logical)
                outputs.append(Output(name, dtype_name(logical), shape, compute=compute))
            else:
                outputs.append(by_name[name])
        plan = Plan(tuple(outputs))
        return write_conversion(
            ckpt,
            Path(dst),
            plan,
            TEFolder(layout, ckpt.config, ckpt.source).to_bytes(),
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
            dry_run=dry_run,
        )


def _plan_plain(ckpt: Checkpoint) -> Plan:
    target = te_namespace(ckpt.config, ckpt.layout or "grouped")
    return make_plan(ckpt.tensors, ckpt.namespace, target, where=str(ckpt.path), ignorable=ckpt.ignorable)


def _dequantized(params: Parameters, name: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def compute() -> torch.Tensor:
        tensor = params.quantized(name)
        if not isinstance(tensor, GroupedTensor):
            return tensor.dequantize(dtype)
        out = torch.empty(tensor.shape, dtype=dtype)
        for g, member in enumerate(tensor.members()):
            out[g] = member.dequantize(dtype)
        return out

    return compute


class _Fields:
    """The fields of one parameter, quantized when the first is written and dropped when the last one has been."""

    def __init__(self, name: str, shape: Shape, quantizer: Quantizer, params: Parameters, members: Parameters) -> None:
        self._name, self._shape, self._quantizer = name, shape, quantizer
        self._params, self._members = params, members
        self._ready: dict[str, torch.Tensor] = {}

    def entry(self, entry: str) -> Callable[[], torch.Tensor]:
        """Return the function that computes the entry of that name; each may be called once."""

        def compute() -> torch.Tensor:
            if not self._ready:
                self._ready = stored_fields(self._name, self._quantize())
            return self._ready.pop(entry)

        return compute

    def _quantize(self) -> QuantizedTensor:
        if len(self._shape) == 2:
            return self._quantizer.quantize(self._params.plain(self._name))
        fields = {
            field: torch.empty(spec.shape, dtype=spec.dtype)
            for field, spec in self._quantizer.quantize_fields(torch.empty(self._shape, device="meta")).items()
        }
        dtype = self._params.dtype(self._name)
        grouped = GroupedTensor(fields, self._quantizer, torch.Size(self._shape), dtype)
        for member, name in zip(grouped.members(), self._params.members(self._name), strict=True):
            # one matrix at a time: each has its own scales, so this is what quantizing the whole stack gives
            member.copy_(self._members.plain(name))
        return grouped
