"""A sharded checkpoint: written by all ranks, read by any number of them in any layout, exported by one.

    output_dir/checkpoints/step-00000100/
        parts/                  what each rank wrote (`storage`): weights, moments, masters, random and recipe states
        training.json           step, data position, ranks, the whole TrainConfig, the ModelConfig
        manifest.json           size and SHA-256 of these, and of each rank's list of digests in parts/

Each rank digests what it writes, and the first one joins the digests of those lists. It reads nothing of other ranks.
As every checkpoint it appears by one rename, when all ranks have written and the index has been read back.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.checkpoints import CheckpointError, save_model
from te_models.checkpoints.io.atomic import flush, new_folder
from te_models.checkpoints.io.errors import quote
from te_models.checkpoints.io.hashing import FileRecord
from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes
from te_models.checkpoints.mapping.quantized_format import SUFFIXES, empty
from te_models.checkpoints.mapping.quantized_format import quantized_metadata as describe_format
from te_models.checkpoints.write.writer import write_small_file, write_tensors
from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import local_part

from ....lora.model import base_state_dict
from ....model import GPTModel
from ....parallel.parts import LocalPart, ModelParts
from ...ranks.data_parallel import Ranks
from ..checks import PARTS, SHARDED_VERSION, VALUES, TrainingCheckpointError, check_ranges
from ..files import checkpoint_dir, digests_of, remove_old
from .index import INDEX, CheckpointIndex, file_of, read_parts_index
from .index_file import write_file
from .join import Exchange, describe_parts, join, written_boxes
from .storage import PartReader


def save_parts(
    output_dir: Path,
    model: GPTModel,
    parts: Mapping[str, LocalPart],
    values: Mapping[str, Any],
    ranks: Ranks,
    *,
    keep_last: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of `values["step"]`, called by all ranks; the first one then removes all but the newest
    `keep_last`, and is the last to return. parts: what this rank has, by name; values: of training.json. group: of all
    ranks; nothing else uses it meanwhile; None: the default one. Raises CheckpointError on every rank, and leaves
    nothing, where one cannot write."""
    target = checkpoint_dir(output_dir, values["step"])
    if not ranks.is_main:
        (folder,) = _from_first_rank([None], group)
        if folder is not None:
            _write_parts(Path(folder), parts, ranks, group)
        return target
    announced = False
    try:
        with new_folder(target, overwrite=False, flushed=PARTS) as folder:
            (folder / PARTS).mkdir()
            announced = True
            _from_first_rank([str(folder / PARTS)], group)
            records = _write_parts(folder / PARTS, parts, ranks, group)
            whole = {"version": SHARDED_VERSION, **values, "model_config": model.config.to_dict()}
            text = json.dumps(whole, indent=2, allow_nan=False)
            records[VALUES] = write_small_file(folder / VALUES, (text + "\n").encode())
            (folder / MANIFEST).write_bytes(manifest_bytes(records))
    finally:
        if not announced:
            _from_first_rank([None], group)
    remove_old(output_dir, keep_last)
    return target


def _from_first_rank(value: list[Any], group: dist.ProcessGroup | None) -> list[Any]:
    if dist.is_initialized():  # a rank that is alone has it
        dist.broadcast_object_list(value, src=0, device=torch.device("cpu"), group=group)
    return value


def _write_parts(
    folder: Path, parts: Mapping[str, LocalPart], ranks: Ranks, group: dist.ProcessGroup | None
) -> dict[str, FileRecord]:
    """Write this rank's part, and on the first rank the index; return there what the manifest lists of the folder.
    Raises CheckpointError on every rank where one fails."""
    exchange, file = Exchange(folder.parent, ranks, group), file_of(ranks.rank)
    joined: list[CheckpointIndex] = []

    def answer(descriptions: list[bytes]) -> list[bytes]:
        index, writes = join(descriptions)
        joined.append(index)
        return writes

    def finish(written: list[FileRecord]) -> list[Any]:
        record = write_file(folder, joined[0])
        read_parts_index(folder).check_same(joined[0])
        lists = {f"{PARTS}/{digests_of(file_of(rank))}": its for rank, its in enumerate(written)}
        return [{f"{PARTS}/{INDEX}": record} | lists, *[{}] * (len(written) - 1)]

    writes = exchange.turn(lambda: describe_parts(parts), answer)

    def write() -> FileRecord:
        record = write_tensors(folder / file, written_boxes(parts, writes))
        listed = write_small_file(folder / digests_of(file), manifest_bytes({file: record}))
        flush(folder / digests_of(file))
        return listed

    return exchange.turn(write, finish)


def load_parts(folder: Path, parts: Mapping[str, LocalPart], index: CheckpointIndex | None = None) -> None:
    """Fill this rank's parts from a checkpoint, in any layout. Each rank reads for itself. index: of
    `read_parts_index`.

    Raises TrainingCheckpointError where the checkpoint lacks one of them, or holds it with another
    shape or dtype.
    """
    try:
        index = index or read_parts_index(folder / PARTS)
        for name, part in parts.items():
            saved = index.tensors.get(name)
            if saved is None:
                raise TrainingCheckpointError(f"{folder} lacks {name!r}")
            if saved.shape != tuple(part.shape):
                found, allowed = list(saved.shape), list(part.shape)
                raise TrainingCheckpointError(f"{folder} holds {name!r} with shape {found}; allowed: {allowed}")
        with PartReader(folder / PARTS, index) as reader:
            reader.fill(parts)
    except CheckpointError as error:
        raise TrainingCheckpointError(f"{folder} cannot be used: {error}") from None
    check_ranges({name: part.tensor for name, part in parts.items() if name.startswith("optimizer.")})


def check_known(folder: Path, parts: Mapping[str, LocalPart], names: Collection[str]) -> None:
    """Raise TrainingCheckpointError where a checkpoint holds weights, adapters or optimizer state of what is not in the
    model. parts: of this rank, by their names in the checkpoint; names: of everything in the whole model."""
    for stored in read_parts_index(folder / PARTS).tensors:
        kind, _, name = stored.partition("@")[0].partition(".")
        entry = name.rpartition(".")[0] if kind == "optimizer" else name
        fields = (entry.removesuffix(suffix) for suffix in SUFFIXES.values())
        if kind in ("model", "optimizer", "lora") and stored not in parts and not any(f in names for f in fields):
            raise TrainingCheckpointError(f"{folder} holds {quote(stored)}, which is not of this model")


def private_states(states: Mapping[str, Tensor], prefix: str, rank: int) -> dict[str, LocalPart]:
    """Return what only this rank has, under names with its number."""
    return {f"{prefix}.{rank}.{name}": LocalPart.undivided(t) for name, t in states.items()}


def read_private(folder: Path, prefix: str, rank: int) -> dict[str, Tensor]:
    """Return what a rank of the run before had alone."""
    own = f"{prefix}.{rank}."
    return {name.removeprefix(own): tensor for name, tensor in read_wholes(folder, own).items()}


def read_wholes(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, whole, by the names that they have in the checkpoint."""
    index = read_parts_index(folder / PARTS)
    found = {
        name: LocalPart.undivided(torch.empty(saved.shape, dtype=saved.dtype, device="cpu"))
        for name, saved in index.tensors.items()
        if name.startswith(prefix)
    }
    try:
        with PartReader(folder / PARTS, index) as reader:
            reader.fill(found)
    except CheckpointError as error:
        raise TrainingCheckpointError(f"{folder} cannot be used: {error}") from None
    return {name: part.tensor for name, part in found.items()}


def saved_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of everything that a checkpoint holds, by name."""
    return {name: saved.dtype for name, saved in read_parts_index(folder / PARTS).tensors.items()}


def export_parts(
    folder: Path,
    model: GPTModel,
    out: Path,
    source: str | None,
    *,
    averages: bool = False,
    merged: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> None:
    """Write the model of a checkpoint as an ordinary folder; called by one rank, with one tensor in memory at a time.

    source: the folder that the model came from, whose tokenizer and small files are copied. averages: write those of
    `ema_decay` in place of what they are averages of. merged: by name, what gives the values to write in place of a
    tensor's: plain values, also for a quantized tensor.
    """
    index = read_parts_index(folder / PARTS)
    wholes, dtypes = ModelParts(model).wholes(), _field_dtypes(model)
    stored_as = {name: f"model.{name}" for name in dict.fromkeys((*wholes, *dtypes))}
    for name in wholes if averages else ():
        if f"optimizer.{name}.ema" in index.tensors:
            stored_as[name], wholes[name] = f"optimizer.{name}.ema", wholes[name].float()

    changes = merged or {}
    stored = {name: wholes[name] for name in changes}
    wholes |= {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in stored.items()}

    def fetch(name: str) -> Tensor:
        if name not in changes:
            return read(name)
        tensor = stored[name]
        if isinstance(tensor, QuantizedTensor):
            values = empty(name, tensor.shape, describe_format(tensor.quantizer, tensor.dtype), "cpu")
            for field, its in values.fields.items():
                its.copy_(read(name + SUFFIXES[field]))
        else:
            values = read(name)
        return changes[name](values)

    def read(name: str) -> Tensor:
        key = stored_as.get(name, f"model.{name}")
        saved = index.tensors[key]
        whole = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        reader.fill({key: LocalPart.undivided(whole)})
        return whole.view(dtypes.get(name, whole.dtype))

    with PartReader(folder / PARTS, index) as reader:
        save_model(wholes, model.config, out, source_dir=source, source=model.origin, fetch=fetch, overwrite=True)


def _field_dtypes(model: GPTModel) -> dict[str, torch.dtype]:
    """Return the dtypes of the fields of quantized weights by the names that they have in files."""
    found: dict[str, torch.dtype] = {}
    for name, tensor in base_state_dict(model.whole or model).items():
        local = local_part(tensor)
        if isinstance(local, QuantizedTensor):
            found |= {name + SUFFIXES[field]: value.dtype for field, value in local.fields.items()}
    return found
