"""Store the weights of linear layers as a recipe quantizes them, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from te_models.layers import Recipe
from te_models.layers import recipe as recipe_by_name
from te_models.layers.field_schema import empty_fields
from te_models.layers.quantizer import Quantizer

from .bands import BAND_ELEMENTS, Map, Rows, dequantize_bands, quantize_into
from .boxes import Shape
from .carried import our_names
from .checkpoint import Checkpoint, open_checkpoint
from .convert import PathLike, refuse_quantized, source_of
from .dtypes import as_torch_dtype, dtype_name
from .errors import CheckpointError
from .meter import Progress
from .output_folder import write_conversion
from .parameters import Parameters
from .plan import Output, Plan, make_plan
from .quantized_format import SUFFIXES, describe, field_specs, quantizer_of
from .shards import MAX_SHARD_BYTES
from .te_folder import TEFolder
from .te_namespace import formats_in_layout, te_namespace
from .threads import cores, worker_threads

MAX_THREADS = 8
"""Threads that quantize one parameter; each has working copies of a band of rows."""


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

    recipe: a recipe or its name (a key of RECIPES); its weight quantizer decides format and scales. The
    result is what quantizing the loaded weights gives, bit for bit; every expert has its own scales in both layouts.
    Memory is that of one usage's fields of one parameter and the quantizer's working copies of a few rows.
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
            if output.name in plain.carried or not is_linear_weight(output.name):
                outputs.append(output)
                continue
            meta = describe(quantizer, params.dtype(output.name))
            formats[output.name] = meta
            makers = {
                suffix: make.entry(field)
                for make in (_Fields(output.name, output.shape, q, params, members) for q in _by_usage(quantizer))
                for field, suffix in make.suffixes()
            }
            for suffix, spec in field_specs(output.name, output.shape, meta).items():
                entry = output.name + suffix
                (dtype,) = spec.dtypes
                outputs.append(Output(entry, dtype, spec.shape, compute=makers[suffix]))
        plan = replace(plain, outputs=tuple(outputs), formats=formats)
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
    """Write a folder of ours in which quantized weights are stored as values, in `dtype` or their logical dtype.

    Memory is that of the working copies of a few rows.
    """
    wanted = as_torch_dtype(dtype)
    with open_checkpoint(src) as ckpt:
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
    kept = our_names(ckpt.carried)
    return make_plan(ckpt.tensors, ckpt.namespace, target, where=str(ckpt.path), unused=ckpt.unused, carried=kept)


def _matrices(params: Parameters, members: Parameters, name: str) -> tuple[Parameters, list[str]]:
    """Return where to read the matrices of a parameter, which have their own scales, and their names there."""
    return (params, [name]) if len(params.shapes[name]) == 2 else (members, list(params.members(name)))


def _dequantized(
    params: Parameters, members: Parameters, name: str, dtype: torch.dtype
) -> Callable[[], Iterator[torch.Tensor]]:
    """Return the function that computes the values of one parameter, band after band."""

    def compute() -> Iterator[torch.Tensor]:
        quantizer, _ = quantizer_of(name, params.formats[name])
        source, names = _matrices(params, members, name)
        for matrix in names:

            def read(field: str, axis: int, part: Rows | None, matrix: str = matrix) -> torch.Tensor:
                entry = matrix + SUFFIXES[field]
                return source.entry(entry) if part is None else source.part(entry, axis, *part)

            yield from dequantize_bands(quantizer, params.shapes[name][-2:], dtype, read)

    return compute


def _by_usage(quantizer: Quantizer) -> list[Quantizer]:
    """Return quantizers that make the stored copies one by one."""
    usages = quantizer.stored_usages()
    if len(usages) == 1:
        return [quantizer]
    return [quantizer.with_usage(rowwise=u == "rowwise", columnwise=u == "columnwise") for u in usages]


class _Fields:
    """The fields of one parameter, quantized when the first is written and dropped when the last one has been."""

    def __init__(self, name: str, shape: Shape, quantizer: Quantizer, params: Parameters, members: Parameters) -> None:
        self._name, self._shape, self._quantizer = name, shape, quantizer
        self._params, self._members = params, members
        self._ready: dict[str, torch.Tensor] = {}

    def suffixes(self) -> Iterator[tuple[str, str]]:
        """List the fields, each with what its entry's name adds to the parameter's."""
        return ((field, SUFFIXES[field]) for field in self._quantizer.field_names())

    def entry(self, field: str) -> Callable[[], list[torch.Tensor]]:
        """Return the function that computes one field; each may be called once."""

        def compute() -> list[torch.Tensor]:
            if not self._ready:
                self._ready = self._quantize()
            return [self._ready.pop(field)]

        return compute

    def _quantize(self) -> dict[str, torch.Tensor]:
        fields = empty_fields(self._quantizer, torch.Size(self._shape), "cpu")
        source, names = _matrices(self._params, self._members, self._name)
        # each matrix has its own scales, so this is what quantizing the whole stack gives
        parts = [fields] if len(self._shape) == 2 else [{f: v[g] for f, v in fields.items()} for g in range(len(names))]

        def fill(matrix: str, own: dict[str, torch.Tensor], run: Map = map) -> None:
            quantize_into(own, self._quantizer, self._shape[-2:], functools.partial(source.part, matrix, 0), run)

        threads = min(cores(), MAX_THREADS, math.prod(self._shape) // (2 * BAND_ELEMENTS))
        if threads < 2:
            for matrix, own in zip(names, parts):
                fill(matrix, own)
            return fields
        with worker_threads(threads) as pool:
            if len(names) < threads:  # few matrices, each with bands enough for all
                for matrix, own in zip(names, parts):
                    fill(matrix, own, pool.map)
            else:
                for _ in pool.map(fill, names, parts):
                    pass
        return fields
