"""Our folders to checkpoints of training systems; see `foreign/`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Unpack

from te_models.config import ModelConfig
from te_models.lazy import torch

from ..folder.checkpoint import open_checkpoint
from ..foreign.known import MODULES, OWN, RANKS, SYSTEMS
from ..foreign.legacy import write_legacy
from ..foreign.ranks import ParallelSizes, RankFiles
from ..foreign.state_dict import TORCH_FILES
from ..foreign.transformer_engine import transformer_engine
from ..foreign.written import Written
from ..io.atomic import new_folder, replaced_file
from ..io.destination import check_destination, check_place, check_space
from ..io.dtypes import as_torch_dtype
from ..io.errors import CheckpointError
from ..io.manifest import MANIFEST, manifest_bytes
from ..io.store import Store
from ..mapping.param_shapes import ExpertLayout, check_layout
from ..mapping.plan import ConversionPlan, make_plan
from ..mapping.stream import read_rows
from ..write.shards import MAX_SHARD_BYTES, split_shards
from ..write.writer import write_small_file, write_weights
from .conversion import ConversionKeywords, PathLike, split_options

TARGETS = (*SYSTEMS, RANKS, MODULES)


def export_checkpoint(
    src: PathLike,
    dst: PathLike,
    *,
    to: str,
    dtype: torch.dtype | str | None = None,
    layout: ExpertLayout | None = None,
    qkv_weight_interleaved: bool = True,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    make_vocab_size_divisible_by: int = 128,
    local_modules: bool = False,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Convert a te_models folder to a checkpoint that a training system loads, as a stream.

    Arguments:
        to: distributed checkpoints: "torchtitan", "torch_dist" (Megatron-Core), "fsdp_dtensor" (Megatron-FSDP),
            "te_models" or "transformers" (the names of the model in torch's DCP); files of ranks: "megatron"; a state
            dict of Transformer Engine's modules: "transformer_engine", a file of torch's where `dst` ends in .pt, .pth
            or .bin, else a folder of safetensors files.
        qkv_weight_interleaved: of "transformer_engine" alone, as its modules are made: q, k and v group by group, or
            all queries, all keys, all values.

    The fields of `te_models.checkpoints.tools.options.ExportOptions` say what the other arguments mean.

    Raises CheckpointError, before anything is written, for a model that the system's names do not cover.
    """
    sizes = tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size
    if to not in TARGETS:
        raise CheckpointError(f"the system is {to!r}; allowed: {', '.join(TARGETS)}")
    if to != RANKS and (sizes, make_vocab_size_divisible_by, local_modules) != ((1, 1, 1), 128, False):
        raise CheckpointError(f"numbers of ranks are of the system {RANKS!r}, and this one is {to!r}")
    if to != MODULES and (layout is not None or not qkv_weight_interleaved):
        raise CheckpointError(f"layout and qkv_weight_interleaved are of {MODULES!r}, and the system is {to!r}")
    if make_vocab_size_divisible_by < 1:
        raise CheckpointError(f"make_vocab_size_divisible_by is {make_vocab_size_divisible_by}; allowed: 1 and more")
    verify, how = split_options(options)
    out, overwrite = Path(dst), bool(how.get("overwrite", False))
    as_file = to == MODULES and out.suffix in TORCH_FILES
    with ExitStack() as stack:
        ckpt = open_checkpoint(src, verify=verify)
        stack.callback(ckpt.close)
        if ckpt.kind != "te_models":
            values = " --dequantize" if ckpt.formats else ""
            raise CheckpointError(
                f"{src} is a Hugging Face folder; te-models import {src} DIR{values}, then export DIR"
            )
        if ckpt.formats:
            raise CheckpointError(f"{src} has quantized weights; te-models dequantize {src} DIR, then export DIR")
        ranks, system = None, SYSTEMS.get(to, OWN)
        if to == RANKS:
            ranks = _ranks(ckpt.config, ParallelSizes(*sizes), make_vocab_size_divisible_by, local_modules)
        if to == MODULES:
            grouped = check_layout(layout or "per-gemm") == "grouped"
            system = transformer_engine(grouped=grouped, interleaved=qkv_weight_interleaved)
        namespace = system.namespace(ckpt.config) if ranks is None else ranks.namespace()
        wanted = as_torch_dtype(dtype)
        plan = make_plan(ckpt.tensors, ckpt.namespace, namespace, where=str(src), dtype=wanted, unused=ckpt.unused)
        check_place(out)
        if not as_file:
            check_destination(out, overwrite=overwrite)
        elif out.exists() and (out.is_dir() or not overwrite):
            raise CheckpointError(f"{out} exists; choose another destination or pass overwrite")
        check_space(out, plan.total_bytes)
        if how.get("dry_run"):
            return plan
        ckpt.check_values()
        outputs = [Written(o.name, o.dtype, o.shape, partial(read_rows, ckpt.store, o)) for o in plan.outputs]
        if as_file:
            from ..foreign.write_torch import write_torch_file

            with replaced_file(out) as scratch:
                write_torch_file(scratch, {}, outputs, stem=out.stem)
                ckpt.files.finish_checks()
            return plan
        with new_folder(out, overwrite=overwrite) as folder:
            if ranks is not None:
                write_legacy(folder, {output.name: output for output in outputs}, ranks)
            elif to == MODULES:
                _write_safetensors(folder, plan, ckpt.store, how.get("max_shard_bytes", MAX_SHARD_BYTES))
            else:
                from ..foreign.write_dcp import write_dcp

                write_dcp(folder, outputs, megatron=to == "torch_dist", prefix=SYSTEMS[to].prefix)
            ckpt.files.finish_checks()
        return plan


def _ranks(config: ModelConfig, split: ParallelSizes, multiple: int, local: bool) -> RankFiles:
    each = multiple * split.tp
    return RankFiles(config, split, -(-config.vocab_size // each) * each, local=local)


def _write_safetensors(folder: Path, plan: ConversionPlan, store: Store, max_shard_bytes: int) -> None:
    records = write_weights(folder, split_shards(plan, max_shard_bytes), store)
    write_small_file(folder / MANIFEST, manifest_bytes(records))
