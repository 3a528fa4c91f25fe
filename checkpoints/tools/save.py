"""Save a live model's parameters as a folder of ours."""

import contextlib
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from te_models.config import ModelConfig
from te_models.layers import QuantizedTensor

from ..folder.checkpoint import open_checkpoint
from ..folder.load import check_shapes, layout_of_names
from ..folder.passthrough import our_names
from ..folder.provenance import provenance_source, with_stale_weights
from ..folder.te_folder import HFSource, TEFolder
from ..io.errors import CheckpointError
from ..io.store import JoinedStore, MemoryStore, Store
from ..io.threads import Progress
from ..mapping.param_shapes import expected_tensors, is_table
from ..mapping.plan import ConversionPlan, OutputTensor, make_plan
from ..mapping.quantized_format import Description, quantized_metadata, stored_fields
from ..mapping.te_namespace import grouped_formats, te_namespace
from ..write.output_folder import write_folder
from ..write.shards import MAX_SHARD_BYTES
from .conversion import PathLike


def save_model(
    params: Mapping[str, torch.Tensor],
    config: ModelConfig,
    out_dir: PathLike,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source_dir: PathLike | None = None,
    source: HFSource | None = None,
    fetch: Callable[[str], torch.Tensor] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConversionPlan:
    """Write a model; `open_checkpoint(out_dir).load_into(params)` restores every bit, quantized parameters included.

    Arguments:
        params: every parameter by name, in grouped or per-GEMM layout, on any device; quantized ones stay quantized.
        source_dir: a folder (of either kind) that the model came from: its tokenizer files, its Hugging Face
            configuration and the tensors that the model does not use travel along, so that an export restores them.
        source: the Hugging Face configuration to record where there is no source_dir.
        fetch: returns a tensor of the files by its name, when its turn comes; `params` may then be without data (on the
            meta device). None: they have it.
    """
    layout = layout_of_names(params, config, "the names of the parameters to save")
    check_shapes(params, expected_tensors(config, layout))
    entries, best_formats = stored_entries(params)
    formats = grouped_formats(config, layout, best_formats)
    namespace = te_namespace(config, layout, formats)
    store = MemoryStore(entries)
    owners: dict[str, Store] = dict.fromkeys(entries, store)
    with contextlib.ExitStack() as opened:
        # not checked: that a tokenizer's file was edited meanwhile must not keep a trained model from being saved
        mtp = config.mtp_num_layers > 0
        provenance = (
            None if source_dir is None else opened.enter_context(open_checkpoint(source_dir, mtp=mtp, verify=False))
        )
        passthrough = our_names(provenance.passthrough) if provenance is not None else {}
        if provenance is not None:
            owners.update(dict.fromkeys(passthrough, provenance.store))
        joined = JoinedStore(owners)
        moved = make_plan(
            joined.tensors, namespace, namespace, where="the model", unused=passthrough, passthrough=passthrough
        )
        outputs, in_files = moved.outputs, set(passthrough.values())
        if fetch is not None:
            outputs = tuple(_fetched(output, fetch, in_files) for output in outputs)
        plan = replace(moved, outputs=outputs, formats=best_formats)
        recorded = source if provenance is None else provenance_source(provenance, formats)
        recorded = with_stale_weights(
            recorded, provenance, layout, best_formats.keys(), entries, fetch or entries.__getitem__
        )
        return write_folder(
            Path(out_dir),
            plan,
            joined,
            TEFolder(layout, config, recorded).to_bytes(),
            sidecars_from=provenance.path if provenance is not None else None,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )


def stored_entries(params: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Description]]:
    """Return what files hold of parameters: tensors by entry name, and the descriptions of the quantized parameters.
    CheckpointError for one of whole numbers where a number is a weight."""
    entries: dict[str, torch.Tensor] = {}
    described: dict[str, Description] = {}
    for name, param in params.items():
        if isinstance(param, QuantizedTensor):
            described[name] = quantized_metadata(param.quantizer, param.dtype)
            entries.update(stored_fields(name, param))
        elif not param.is_floating_point() and not is_table(name):
            raise CheckpointError(f"{name} has dtype {param.dtype}; parameters are floating-point or quantized")
        else:
            entries[name] = param
    return entries, described


def _fetched(output: OutputTensor, fetch: Callable[[str], torch.Tensor], in_files: Container[str]) -> OutputTensor:
    return output if output.name in in_files else replace(output, compute=lambda: [fetch(output.name)])
