"""Save a live model's parameters as a folder of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from te_models.config import ModelConfig
from te_models.layers import QuantizedTensor

from .checkpoint import open_checkpoint
from .convert import PathLike, source_of
from .errors import CheckpointError
from .load import check_shapes, layout_of
from .meter import Progress
from .naming import expected_tensors
from .output_folder import write_folder
from .plan import Plan, make_plan
from .quantized_format import Description, describe, stored_fields
from .shards import MAX_SHARD_BYTES
from .store import MemoryStore
from .te_folder import TEFolder
from .te_namespace import grouped_formats, te_namespace


def save_model(
    params: Mapping[str, torch.Tensor],
    config: ModelConfig,
    out_dir: PathLike,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source_dir: PathLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Write a model; `open_checkpoint(out_dir).load_into(params)` restores every bit, quantized parameters included.

    Arguments:
        params: every parameter by name, in grouped or per-GEMM layout, on any device; quantized ones stay quantized.
        source_dir: a folder (of either kind) that the model came from: its tokenizer files and its Hugging Face
            configuration travel along, so that an export restores them.
    """
    layout = layout_of(params, config, "the names of the parameters to save")
    check_shapes(params, expected_tensors(config, layout))
    entries: dict[str, torch.Tensor] = {}
    stored_formats: dict[str, Description] = {}
    for name, param in params.items():
        if isinstance(param, QuantizedTensor):
            stored_formats[name] = describe(param.quantizer, param.dtype)
            entries.update(stored_fields(name, param))
        elif not param.is_floating_point():
            raise CheckpointError(f"{name} has dtype {param.dtype}; parameters are floating-point or quantized")
        else:
            entries[name] = param
    store = MemoryStore(entries)
    formats = grouped_formats(config, layout, stored_formats)
    namespace = te_namespace(config, layout, formats)
    moved = make_plan(store.tensors, namespace, namespace, where="the model")
    plan = Plan(moved.outputs, formats=stored_formats)
    source, sidecars = None, None
    if source_dir is not None:
        sidecars = Path(source_dir)
        with open_checkpoint(sidecars) as ckpt:
            source = source_of(ckpt)
    write_folder(
        Path(out_dir),
        plan,
        store,
        TEFolder(layout, config, source).to_bytes(),
        sidecars_from=sidecars,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    return plan
