"""Checkpoints of training systems to our folders; see `foreign/`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Unpack

from te_models.config import ConfigError, ModelConfig
from te_models.lazy import torch
from te_models.sizes import plural

from ..families import family_of
from ..folder.te_folder import CONFIG, MODEL_TYPE, HFSource, TEFolder
from ..foreign.common import COMMON, read_common
from ..foreign.dcp import METADATA, DCPStore
from ..foreign.flat_moments import TiledStore, has_buckets, is_tiled, open_buckets
from ..foreign.known import MODULES, RANKS, STATE_DICTS, SYSTEMS, find_system, name_of_state_dict
from ..foreign.legacy import LegacyStore, is_legacy, newest_of
from ..foreign.plain_pickle import Record
from ..foreign.ranks import ParallelSizes, RankFiles, RankPlace
from ..foreign.state_dict import EXTRA_STATE, is_state_dict, open_state_dict
from ..foreign.system import MOMENTS, System
from ..foreign.transformer_engine import transformer_engine
from ..foreign.views import RenamedStore, common_prefix, without_padding
from ..formats import without_quantization
from ..io.dtypes import as_torch_dtype
from ..io.errors import CheckpointError
from ..io.header import TensorInfo
from ..io.store import JoinedStore, Store
from ..io.strict_json import read_object
from ..io.weight_files import plain_file
from ..mapping.param_shapes import ExpertLayout, check_layout
from ..mapping.plan import ConversionPlan, make_plan
from ..mapping.report import moved_report
from ..mapping.te_namespace import te_namespace
from ..mapping.tensor_map import Namespace
from ..write.output_folder import write_folder
from .conversion import ConversionKeywords, PathLike, split_options

_CORES = {
    "torchtitan": "tok_embeddings.weight",
    "transformers": "model.embed_tokens.weight",
}


def is_foreign(path: Path) -> bool:
    """Whether a path is a distributed checkpoint, one of Megatron's ranks, a run of Megatron's, or a file with a state
    dict. A folder of safetensors files may hold a state dict, too, or a model of Hugging Face: its names say it."""
    if path.is_file():
        return is_state_dict(path)
    folder = newest_of(path)
    return (folder / METADATA).is_file() or is_legacy(folder)


def read_any_config(path: Path) -> tuple[ModelConfig, HFSource | None]:
    """Return the model that a config.json, or the folder that has one, describes: ours or a Hugging Face one.

    Raises CheckpointError for anything else."""
    file = path / CONFIG if path.is_dir() else path
    values = read_object(plain_file(file.parent, file.name), str(file))
    if values.get("model_type") == MODEL_TYPE:
        folder = TEFolder.from_dict(values)
        return folder.config, folder.source
    if "model_type" in values:
        family = family_of(values.get("model_type"))
        values = without_quantization(values)
        return family.read_config(values), HFSource(family.model_type, values, None)
    try:
        return ModelConfig.from_dict(values), None
    except ConfigError as error:
        raise CheckpointError(f"{file} describes no model: {error}") from None


class Opened(NamedTuple):
    """A checkpoint of another system.

    Attributes:
        store: the tensors of the model, and others.
        namespace: how they store the model.
        unused: those that are no part of it.
        pickled: how many of them are states that Transformer Engine pickled.
    """

    store: Store
    namespace: Namespace
    unused: list[str]
    pickled: int = 0


def open_foreign(
    store: DCPStore, config: ModelConfig, system: str | None, state: str | None = None
) -> tuple[System, Store, Namespace]:
    """Return the system that a distributed checkpoint is of, its tensors as that names them, and how it stores the
    model.

    system: a key of SYSTEMS; None: told by the names. state: of the optimizer; None: the weights.
    """
    if system is not None and system not in SYSTEMS:
        raise CheckpointError(f"the system is {system!r}; allowed: {', '.join(SYSTEMS)}")
    weights = [name for name in store.tensors if "optim" not in name.partition(".")[0]]
    chosen = find_system(store.folder, weights) if system is None else SYSTEMS[system]
    core = _CORES.get(chosen.name, "embedding.word_embeddings.weight")
    prefix = common_prefix(weights, core)
    names = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
    others = {name for name in names if chosen.is_other(name)}
    names = {name: stored for name, stored in names.items() if name not in others}
    held = {name: store.tensors[its] for name, its in names.items()}
    namespace = chosen.namespace(config, held, state)
    if state is not None:
        names = {name: _stored_state(name, store) for name in namespace.stored}
        shapes = {name: stored.shape for name, stored in namespace.stored.items()}
        flat = {n: its for n, its in names.items() if is_tiled(store.tensors[its].shape, shapes[n])}
        whole = {name: its for name, its in names.items() if name not in flat}
        tensors = without_padding({name: store.tensors[its] for name, its in whole.items()}, namespace.stored)
        owners: dict[str, Store] = dict.fromkeys(whole, RenamedStore(store, whole, tensors))
        return chosen, JoinedStore(owners | dict.fromkeys(flat, TiledStore(store, flat, shapes))), namespace
    tensors = without_padding({name: store.tensors[its] for name, its in names.items()}, namespace.stored)
    return chosen, RenamedStore(store, names, tensors), namespace


def open_states(
    store: DCPStore, config: ModelConfig, system: str | None
) -> tuple[System, list[tuple[str | None, Store, Namespace]], list[str]]:
    """Return the system that a distributed checkpoint is of; of the weights and each moment, by name, its tensors and
    how they store the model; and the names of the weights there. Weights are the optimizer's, where it has float32 ones
    of weights in fewer bits.

    Raises CheckpointError where the checkpoint does not hold them by parameter, nor as Megatron's distributed optimizer
    flattens them."""
    chosen, weights, namespace = open_foreign(store, config, system)
    names = [*weights.tensors]
    low = any(info.dtype != "F32" for name, info in weights.tensors.items() if namespace.stored[name].convertible)
    found: list[tuple[str | None, Store, Namespace]] = []
    if chosen is SYSTEMS["torch_dist"] and has_buckets(store.tensors):
        states = [*(["param"] if low else []), *MOMENTS]
        opened = open_buckets(store, config, (weights, namespace), states, _split(store), store.folder)
        found = [(None if state == "param" else state, *its) for state, its in zip(states, opened, strict=True)]
    else:
        masters = [m for m in chosen.masters if any(name.startswith(f"optimizer.state.{m}.") for name in store.tensors)]
        if low and masters:
            found = [(None, *open_foreign(store, config, system, masters[0])[1:])]
        found += [(state, *open_foreign(store, config, system, state)[1:]) for state in MOMENTS]
    return chosen, found if found[0][0] is None else [(None, weights, namespace), *found], names


def _split(store: DCPStore) -> ParallelSizes:
    """Return how many ranks wrote a checkpoint, as the arguments of its run say it."""
    args = read_common(store.folder).get("args")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    found = [args.get(name) if isinstance(args, Record) else None for name in sizes]
    chunks = args.get("virtual_pipeline_model_parallel_size") if isinstance(args, Record) else None
    numbers = [number if type(number) is int else default for number, default in zip((*found, chunks), (0, 0, 1, 1))]
    if 0 in numbers:
        raise CheckpointError(
            f"{store.folder} has moments that ranks flattened together, and {COMMON} does not say how many tensor and "
            "pipeline parallel ranks there were; Megatron writes them by parameter with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    return ParallelSizes(*numbers)


def _stored_state(name: str, store: DCPStore) -> str:
    for stored in (
        name,
        name.replace("optimizer.", "optim.", 1),
        name.replace("optimizer.state.", "optimizer.state.model.", 1),
        name.replace(".module.module.module.", ".module.module.", 1),
    ):
        if stored in store.tensors:
            return stored
    raise CheckpointError(f"{store.folder} has no {name!r}, which moments are called that travel by parameter")


def open_ranks(path: Path, config: ModelConfig, opened: ExitStack) -> Opened:
    """Return the files of Megatron's ranks."""
    store = opened.enter_context(LegacyStore(path))
    ranks = store.ranks(config)
    namespace = ranks.namespace()
    copies = ranks.copies(namespace.stored)
    return Opened(store, namespace, [name for name in store.tensors if name in copies], store.pickled)


def read_modules(
    store: Store, where: PathLike, config: ModelConfig, system: str | None, *, interleaved: bool = True
) -> Opened:
    """Return a state dict in one piece: of Transformer Engine's modules, Megatron's, ours or transformers'."""
    allowed = (*STATE_DICTS, RANKS)
    if system is not None and system not in allowed:
        raise CheckpointError(f"{where} is a state dict, and the system is {system!r}; allowed: {', '.join(allowed)}")
    extra = [name for name in store.tensors if name.endswith(EXTRA_STATE)]
    tensors = {name: info for name, info in store.tensors.items() if name not in extra}
    chosen = name_of_state_dict(str(where), store.tensors) if system is None else system
    core = {MODULES: None, "transformers": "model.embed_tokens.weight"}.get(chosen, "embedding.word_embeddings.weight")
    if chosen != MODULES:
        _check_interleaved(interleaved, where, chosen)
    prefix = "" if core is None else common_prefix(tensors, core)
    names = {name.removeprefix(prefix): name for name in tensors}
    held: Mapping[str, TensorInfo] = {name: tensors[stored] for name, stored in names.items()}
    if chosen == RANKS:
        at = str(RankPlace(0, 0))
        names = {at + name: stored for name, stored in names.items()}
        held = {at + name: info for name, info in held.items()}
        namespace = RankFiles(config, ParallelSizes(), config.vocab_size, held).namespace()
    else:
        how = transformer_engine(interleaved=interleaved) if chosen == MODULES else STATE_DICTS[chosen]
        namespace = how.namespace(config, held)
    held = {**without_padding(held, namespace.stored), **{name: store.tensors[name] for name in extra}}
    pickled = sum(store.tensors[name].nbytes > 0 for name in extra)
    return Opened(RenamedStore(store, names | {name: name for name in extra}, held), namespace, extra, pickled)


def import_checkpoint(
    src: PathLike,
    dst: PathLike,
    *,
    config: PathLike,
    system: str | None = None,
    dtype: torch.dtype | str | None = None,
    layout: ExpertLayout = "grouped",
    qkv_weight_interleaved: bool = True,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Convert the weights of a training system's checkpoint to a te_models folder, as a stream. Nothing is unpickled.

    Arguments:
        src: a distributed checkpoint (torch's DCP, torchtitan's, Megatron-Core's `torch_dist` and `fsdp_dtensor`),
            sharded in any way; a folder of Megatron's ranks (mp_rank_XX); a folder of a run of Megatron's, which says
            its newest; or a state dict, in a file of torch.save or in safetensors files.
        system: whose names the tensors have: "torchtitan", "torch_dist", "fsdp_dtensor", "te_models" or "transformers"
            of a distributed checkpoint, "transformer_engine", "megatron", "te_models" or "transformers" of a state
            dict; None: told by the names.

    The fields of `te_models.checkpoints.tools.options.ImportOptions` say what the other arguments mean.

    Raises CheckpointError, before anything is written, for a checkpoint that cannot be read or is of another model.
    """
    check_layout(layout)
    model, source = read_any_config(Path(config))
    _, how = split_options(options)
    path = Path(src) if Path(src).is_file() else newest_of(Path(src))
    with ExitStack() as opened:
        target = te_namespace(model, layout)
        if is_legacy(path) or (path / METADATA).is_file():
            _check_interleaved(qkv_weight_interleaved, src, RANKS if is_legacy(path) else system or "torch")
        if is_legacy(path):
            if system not in (None, RANKS):
                raise CheckpointError(f"{src} has files of Megatron's ranks, and the system is {system!r}")
            found = open_ranks(path, model, opened)
        elif (path / METADATA).is_file():
            found = Opened(*open_foreign(opened.enter_context(DCPStore(path)), model, system)[1:], [])
        else:
            held = open_state_dict(path)
            opened.callback(held.close)
            found = read_modules(held, src, model, system, interleaved=qkv_weight_interleaved)
        store, namespace, unused, pickled = found
        plan = make_plan(store.tensors, namespace, target, where=str(src), dtype=as_torch_dtype(dtype), unused=unused)
        notes = (*plan.notes, _of_pickled(pickled)) if pickled else plan.notes
        plan = replace(plan, report=moved_report(plan, store.tensors), notes=notes)
        folder = Path(config) if Path(config).is_dir() else None
        content = TEFolder(layout, model, source).to_bytes()
        return write_folder(Path(dst), plan, store, content, sidecars_from=folder, **how)


def _check_interleaved(interleaved: bool, where: PathLike, system: str) -> None:
    """Raise CheckpointError where another order of queries, keys and values is asked of what has but one."""
    if not interleaved:
        raise CheckpointError(f"qkv_weight_interleaved is of {MODULES!r}, and {where} is a checkpoint of {system!r}")


def _of_pickled(count: int) -> str:
    return (
        f"{plural(count, 'module')} of Transformer Engine pickled a state (_extra_state), which is not opened: scales "
        "of delayed scaling start anew"
    )
