"""Training checkpoints: a directory per step that is complete or absent, and never a pickle.

A run in which ranks have parts of layers writes another kind (`sharded.checkpoint`); this is the kind of all others.

    output_dir/checkpoints/step-00000100/
        model/                  an ordinary te_models folder (`GPTModel.from_pretrained` reads it)
        training.safetensors    optimizer moments, master weights, recipes' and random states of every rank
        training.json           step, data position, ranks, the whole TrainConfig
        manifest.json           size and SHA-256 of the two, of every tensor, and of model/manifest.json

The newest checkpoint is found by looking at the directories: there is no `latest` file that a crash could leave
pointing at nothing. A directory appears by one rename after everything in it has reached the disk, so each one that
has its final name is complete. Reading one checks it against its manifests, always (`checks`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_models.checkpoints import CheckpointError, save_model
from te_models.checkpoints.io.atomic import new_folder
from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes, record_files
from te_models.checkpoints.io.store import read_tensors
from te_models.checkpoints.write.writer import write_tensors

from ...model.pretrained.split_saving import save_split
from .checks import (
    MODEL,
    PARTS,
    SHARDED_VERSIONS,
    TENSORS,
    VALUES,
    VERSION,
    TrainingCheckpointError,
    check_tensors,
    manifest_paths,
    read_values,
)
from .files import checkpoint_dir, latest_checkpoint, remove_old

if TYPE_CHECKING:
    from ...config import ModelConfig
    from ...model import GPTModel


@dataclass(frozen=True)
class TrainingState:
    """What a run needs besides the model's weights. `step` counts finished steps, `position` consumed windows.
    data_digest: of the data set that is trained on; None: a checkpoint of before there was one. data_ranks: the ranks
    that read different windows; None: all, or one of those that share each sequence. parts: the folder of a sharded
    checkpoint, whose tensors are read when the model is there; None: `tensors` has them. model_config: of a sharded
    checkpoint's model."""

    step: int
    position: int
    world_size: int
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    data_digest: str | None = None
    data_ranks: int | None = None
    parts: Path | None = None
    model_config: dict[str, Any] | None = None


def export_model(
    model: GPTModel,
    folder: Path,
    output_dir: Path,
    origin: str | None,
) -> None:
    """Write the model as an ordinary folder, with the tokenizer and the family of the model that training began with.

    They are taken from the newest checkpoint, so that only the first save needs the original folder `origin`. Where
    experts are distributed, all ranks that share the first copy of them call this, and the first one writes.
    """
    if model.ep_group is not None:
        save_split(model, folder, _source(output_dir, origin), overwrite=True)
    else:
        export_tensors(dict(model.stored_tensors()), model.config, folder, output_dir, origin)


def export_tensors(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, folder: Path, output_dir: Path, origin: str | None
) -> None:
    """Write the tensors of a whole model as `export_model` does."""
    with torch.no_grad():
        save_model(dict(tensors), config, folder, source_dir=_source(output_dir, origin), overwrite=True)


def _source(output_dir: Path, origin: str | None) -> Path | str | None:
    newest = latest_checkpoint(output_dir)
    return newest / MODEL if newest and (newest / MODEL).is_dir() else origin  # a sharded one has none


def save_checkpoint(output_dir: Path, export: Callable[[Path], None], state: TrainingState, *, keep_last: int) -> Path:
    """Write the checkpoint of `state.step`, then remove all but the newest `keep_last` (0: remove none). export: writes
    the model to a folder. Raises CheckpointError, and leaves nothing of it, where it cannot be written."""
    target = checkpoint_dir(output_dir, state.step)
    with new_folder(target, overwrite=False) as folder:
        export(folder / MODEL)
        written = write_tensors(folder / TENSORS, state.tensors, {"step": str(state.step)})
        values = {"version": VERSION, "step": state.step, "position": state.position, "world_size": state.world_size}
        values |= {"data_digest": state.data_digest}
        text = json.dumps(values | {"config": state.config}, indent=2, allow_nan=False)
        (folder / VALUES).write_text(text + "\n", encoding="utf-8")
        small = {name: path for name, path in manifest_paths(folder).items() if name != TENSORS}
        (folder / MANIFEST).write_bytes(manifest_bytes({TENSORS: written} | record_files(small)))
    remove_old(output_dir, keep_last)
    return target


def load_state(folder: Path, device: torch.device | str = "cpu", *, share: tuple[int, int] = (0, 1)) -> TrainingState:
    """Read everything but the model from a checkpoint directory, after checking every byte of it, the model's too.

    share: of the parts of a sharded checkpoint, check the ones of reader number `share[0]` of `share[1]`.

    Raises TrainingCheckpointError, one sentence, for a file that is not as manifest.json says, one that is missing or
    should not be there, and for values that do not fit each other. A checkpoint of version 1 has no manifest: its
    values are checked alone, and a warning says so.
    """
    values, _ = read_values(folder, share=share)
    if values["version"] in SHARDED_VERSIONS:
        from .sharded.index import index_name, read_parts_index

        try:
            read_parts_index(folder / PARTS).check_names(values["world_size"], index_name(folder / PARTS))
        except CheckpointError as error:
            raise TrainingCheckpointError(f"{folder} cannot be used as a training checkpoint: {error}") from None
        names = ("step", "position", "world_size", "config", "data_digest", "data_ranks", "model_config")
        return TrainingState(tensors={}, parts=folder, **{name: values[name] for name in names})
    try:
        tensors = {name: tensor.to(device) for name, tensor in read_tensors(folder / TENSORS)[0].items()}
    except (CheckpointError, OSError, RuntimeError) as error:
        raise TrainingCheckpointError(f"{folder} cannot be used as a training checkpoint: {error}") from None
    try:
        check_tensors(tensors, values["step"], values["world_size"])
    except TrainingCheckpointError as error:
        raise TrainingCheckpointError(f"{folder} cannot be used as a training checkpoint: {error}") from None
    return TrainingState(
        values["step"],
        values["position"],
        values["world_size"],
        values["config"],
        tensors,
        values.get("data_digest"),
    )
