"""Training checkpoints: a directory per step that is complete or absent, and never a pickle.

    output_dir/checkpoints/step-00000100/
        model/                  an ordinary te_models folder (`GPTModel.from_pretrained` reads it)
        training.safetensors    optimizer moments, master weights, recipes' and random states of every rank
        training.json           step, data position, ranks, the whole TrainConfig
        manifest.json           size and SHA-256 of the two, of every tensor, and of model/manifest.json

The newest checkpoint is found by looking at the directories: there is no `latest` file that a crash could leave
pointing at nothing. A directory appears by one rename after everything in it has reached the disk, so each one that
has its final name is complete. Reading one checks it against its manifests, always (`checkpoint_checks`).
"""

from __future__ import annotations

import json
import shutil
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
    NAME,
    TENSORS,
    VALUES,
    VERSION,
    TrainingCheckpointError,
    check_tensors,
    manifest_paths,
    read_values,
)

if TYPE_CHECKING:
    from ...model import GPTModel


@dataclass(frozen=True)
class TrainingState:
    """What a run needs besides the model's weights. `step` counts finished steps, `position` consumed windows.
    data_digest: of the data set that is trained on; None: a checkpoint of before there was one."""

    step: int
    position: int
    world_size: int
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    data_digest: str | None = None


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints, oldest first. Their names say that they were complete when they were written; what has
    happened to them since, `load_state` finds out."""
    found = []
    for folder in (output_dir / "checkpoints").glob("step-*"):
        match = NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def latest_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    return (list_checkpoints(output_dir) or [None])[-1]


def export_model(model: GPTModel, folder: Path, output_dir: Path, origin: str | None) -> None:
    """Write the model as an ordinary folder, with the tokenizer and the family of the model that training began with.

    They are taken from the newest checkpoint, so that only the first save needs the original folder `origin`. Where
    experts are distributed, all ranks that share the first copy of them call this, and the first one writes.
    """
    newest = latest_checkpoint(output_dir)
    source = newest / MODEL if newest else origin
    if model.ep_group is not None:
        save_split(model, folder, source, overwrite=True)
        return
    with torch.no_grad():
        save_model(dict(model.stored_tensors()), model.config, folder, source_dir=source, overwrite=True)


def save_checkpoint(
    output_dir: Path, model: GPTModel, state: TrainingState, *, origin: str | None, keep_last: int
) -> Path:
    """Write the checkpoint of `state.step`, then remove all but the newest `keep_last` (0: remove none). Raises
    CheckpointError, and leaves nothing of it, where it cannot be written."""
    target = checkpoint_dir(output_dir, state.step)
    with new_folder(target, overwrite=False) as folder:
        export_model(model, folder / MODEL, output_dir, origin)
        written = write_tensors(folder / TENSORS, state.tensors, {"step": str(state.step)})
        values = {"version": VERSION, "step": state.step, "position": state.position, "world_size": state.world_size}
        values |= {"data_digest": state.data_digest}
        text = json.dumps(values | {"config": state.config}, indent=2, allow_nan=False)
        (folder / VALUES).write_text(text + "\n", encoding="utf-8")
        small = {name: path for name, path in manifest_paths(folder).items() if name != TENSORS}
        (folder / MANIFEST).write_bytes(manifest_bytes({TENSORS: written} | record_files(small)))
    checkpoints = list_checkpoints(output_dir)
    for old in checkpoints[:-keep_last] if keep_last else []:
        # Renamed first: a kill during the removal must not leave half a checkpoint under a complete one's name.
        old.rename(old.with_name(f".{old.name}.removed"))
    for leftover in target.parent.glob(".step-*"):
        shutil.rmtree(leftover)
    return target


def load_state(folder: Path, device: torch.device | str = "cpu") -> TrainingState:
    """Read everything but the model from a checkpoint directory, after checking every byte of it, the model's too.

    Raises TrainingCheckpointError, one sentence, for a file that is not as manifest.json says, one that is missing or
    should not be there, and for values that do not fit each other. A checkpoint of version 1 has no manifest: its
    values are checked alone, and a warning says so.
    """
    values, _ = read_values(folder)
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
