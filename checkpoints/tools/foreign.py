"""Checkpoints of training systems to our folders and back; see `foreign/`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from te_models.config import ConfigError, ModelConfig
from te_models.lazy import later

from ..families import family_of
from ..folder.checkpoint import open_checkpoint
from ..folder.te_folder import CONFIG, MODEL_TYPE, Source, TEFolder
from ..foreign.dcp import METADATA, DCPStore
from ..foreign.known import SYSTEMS, find_system
from ..foreign.legacy import LegacyStore, copies_of, is_legacy, legacy_namespace
from ..foreign.system import System
from ..foreign.views import RenamedStore, without_padding, without_prefix
from ..formats import without_quantization
from ..io.atomic import new_folder
from ..io.destination import check_destination, check_place, check_space
from ..io.dtypes import as_torch_dtype
from ..io.errors import CheckpointError
from ..io.store import Store
from ..io.strict_json import read_object
from ..io.weight_files import plain_file
from ..plan.param_shapes import ExpertLayout, check_layout
from ..plan.plan import Plan, make_plan
from ..plan.report import moved_report
from ..plan.stream import read_rows
from ..plan.te_namespace import te_namespace
from ..write.output_folder import write_folder
from .conversion import Options, PathLike, split_options

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

_CORES = {
    "torchtitan": "tok_embeddings.weight",
    "transformers": "model.embed_tokens.weight",
}


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint, or one of Megatron's ranks."""
    return (folder / METADATA).is_file() or is_legacy(folder)


def read_config(path: Path) -> tuple[ModelConfig, Source | None]:
    """Return the model that a config.json, or the folder that has one, describes: ours or a Hugging Face one.

    Raises CheckpointError for what is none."""
    file = path / CONFIG if path.is_dir() else path
    values = read_object(plain_file(file.parent, file.name), str(file))
    if values.get("model_type") == MODEL_TYPE:
        folder = TEFolder.from_dict(values)
        return folder.config, folder.source
    if "model_type" in values:
        family = family_of(values.get("model_type"))
        values = without_quantization(values)
        return family.read_config(values), Source(family.model_type, values, None)
    try:
        return ModelConfig.from_dict(values), None
    except ConfigError as error:
        raise CheckpointError(f"{file} describes no model: {error}") from None


def open_foreign(
    store: DCPStore, config: ModelConfig, system: str | None, state: str | None = None
) -> tuple[System, RenamedStore, Any]:
    """Return the system that a checkpoint is of, its tensors as that names them, and how it stores the model.

    system: a key of SYSTEMS; None: told by the names. state: of the optimizer; None: the weights.
    """
    if system is not None and system not in SYSTEMS:
        raise CheckpointError(f"the system is {system!r}; allowed: {', '.join(SYSTEMS)}")
    weights = [name for name in store.tensors if "optim" not in name.partition(".")[0]]
    chosen = find_system(store.folder, weights) if system is None else SYSTEMS[system]
    core = _CORES.get(chosen.name, "embedding.word_embeddings.weight")
    prefix = without_prefix(weights, core)
    names = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
    others = {name for name in names if chosen.is_other(name)}
    names = {name: stored for name, stored in names.items() if name not in others}
    held = {name: store.tensors[its] for name, its in names.items()}
    namespace = chosen.namespace(config, held, state)
    if state is not None:
        names = {name: _stored_state(name, store) for name in namespace.stored}
    tensors = without_padding({name: store.tensors[its] for name, its in names.items()}, namespace.stored)
    return chosen, RenamedStore(store, names, tensors), namespace


def _stored_state(name: str, store: DCPStore) -> str:
    for stored in (
        name,
        name.replace("optimizer.", "optim.", 1),
        name.replace("optimizer.state.", "optimizer.state.model.", 1),
    ):
        if stored in store.tensors:
            return stored
    raise CheckpointError(
        f"{store.folder} has no {name!r}, which moments are called that travel by parameter; moments that ranks "
        "flattened together (Megatron's dp_reshardable) do not"
    )


def import_checkpoint(
    src: PathLike,
    dst: PathLike,
    *,
    config: PathLike,
    system: str | None = None,
    dtype: torch.dtype | str | None = None,
    layout: ExpertLayout = "grouped",
    **options: Unpack[Options],
) -> Plan:
    """Convert the weights of a distributed checkpoint (torch's DCP, torchtitan's, Megatron-Core's `torch_dist`), or of
    Megatron's ranks (mp_rank_XX), sharded in any way, to a te_models folder, as a stream. Nothing is unpickled.

    Arguments:
        config: a config.json of ours or of Hugging Face, or the folder that has one, whose tokenizer travels along.
        system: "torchtitan", "torch_dist", "te_models" or "transformers"; None: told by the names of the tensors.
        dtype: convert the weights to it; None keeps the bits.
        layout: expert layout of the result.

    Raises CheckpointError, before anything is written, for a checkpoint that cannot be read or is of another model.
    """
    check_layout(layout)
    model, source = read_config(Path(config))
    _, how = split_options(options)
    with ExitStack() as opened:
        target = te_namespace(model, layout)
        store: Store
        unused: list[str] = []
        if is_legacy(Path(src)):
            store = ranks = opened.enter_context(LegacyStore(Path(src)))
            namespace = legacy_namespace(model, ranks)
            unused = list(copies_of(ranks, namespace))
        else:
            _, store, namespace = open_foreign(opened.enter_context(DCPStore(Path(src))), model, system)
        wanted = as_torch_dtype(dtype)
        plan = make_plan(store.tensors, namespace, target, where=str(src), dtype=wanted, unused=unused)
        plan = replace(plan, report=moved_report(plan, store.tensors))
        folder = Path(config) if Path(config).is_dir() else None
        content = TEFolder(layout, model, source).to_bytes()
        return write_folder(Path(dst), plan, store, content, sidecars_from=folder, **how)


def export_checkpoint(
    src: PathLike, dst: PathLike, *, to: str, dtype: torch.dtype | str | None = None, **options: Unpack[Options]
) -> Plan:
    """Convert a te_models folder to a distributed checkpoint that a training system loads, as a stream.

    to: "torchtitan", "torch_dist" (Megatron-Core), "te_models" or "transformers" (the names of the model in torch's
    DCP). Raises CheckpointError, before anything is written, for a model that the system's names do not cover.
    """
    if to not in SYSTEMS:
        raise CheckpointError(f"the system is {to!r}; allowed: {', '.join(SYSTEMS)}")
    verify, how = split_options(options)
    out, overwrite = Path(dst), bool(how.get("overwrite", False))
    with ExitStack() as stack:
        ckpt = open_checkpoint(src, verify=verify)
        stack.callback(ckpt.close)
        if ckpt.kind != "te_models" or ckpt.formats:
            raise CheckpointError(f"{src} is no te_models folder of plain weights; import or dequantize it first")
        plan = make_plan(
            ckpt.tensors,
            ckpt.namespace,
            SYSTEMS[to].namespace(ckpt.config),
            where=str(src),
            dtype=as_torch_dtype(dtype),
            unused=ckpt.unused,
        )
        check_place(out)
        check_destination(out, overwrite=overwrite)
        check_space(out, plan.total_bytes)
        if how.get("dry_run"):
            return plan
        ckpt.check_values()
        from ..foreign.write_dcp import Written, write_dcp

        outputs = [Written(o.name, o.dtype, o.shape, partial(read_rows, ckpt.store, o)) for o in plan.outputs]
        with new_folder(out, overwrite=overwrite) as folder:
            write_dcp(folder, outputs, megatron=to == "torch_dist")
            ckpt.files.finish_checks()
        return plan
