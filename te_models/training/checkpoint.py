"""Training checkpoints: a directory per step that is complete or absent, and never a pickle.

    output_dir/checkpoints/step-00000100/
        model/                  an ordinary te_models folder (`GPTModel.from_pretrained` reads it)
        training.safetensors    optimizer moments, master weights, random states of every rank (uint8)
        training.json           step, data position, ranks, the whole TrainConfig

The newest checkpoint is found by looking at the directories: there is no `latest` file that a crash could leave
pointing at nothing. A directory appears by one rename after everything in it has reached the disk, so each one that
has its final name is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from te_models.checkpoints import save_model
from te_models.checkpoints.atomic import new_folder

from ..model.split_saving import save_split

if TYPE_CHECKING:
    from ..model import GPTModel

_NAME = re.compile(r"step-(\d{8,})")


class TrainingCheckpointError(ValueError):
    """A training checkpoint cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class TrainingState:
    """What a run needs besides the model's weights. `step` counts finished steps, `position` consumed windows."""

    step: int
    position: int
    world_size: int
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    found = []
    for folder in (output_dir / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(folder.name)
        if match and (folder / "training.json").is_file():
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
    source = newest / "model" if newest else origin
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
        export_model(model, folder / "model", output_dir, origin)
        try:
            save_file({name: t.contiguous() for name, t in state.tensors.items()}, folder / "training.safetensors")
        except SafetensorError as error:  # a full disk; it does not say which file
            raise OSError(f"training.safetensors: {error}") from error
        values = {"version": 1, "step": state.step, "position": state.position, "world_size": state.world_size}
        text = json.dumps(values | {"config": state.config}, indent=2, allow_nan=False)
        (folder / "training.json").write_text(text + "\n", encoding="utf-8")
    checkpoints = list_checkpoints(output_dir)
    for old in checkpoints[:-keep_last] if keep_last else []:
        # Renamed first: a kill during the removal must not leave half a checkpoint under a complete one's name.
        old.rename(old.with_name(f".{old.name}.removed"))
    for leftover in target.parent.glob(".step-*"):
        shutil.rmtree(leftover)
    return target


def load_state(folder: Path, device: torch.device | str = "cpu") -> TrainingState:
    """Read everything but the model from a checkpoint directory."""
    try:
        values = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "training.safetensors", device=str(device))
    except Exception as error:
        raise TrainingCheckpointError(f"{folder} cannot be read as a training checkpoint: {error}") from error
    if values.get("version") != 1:
        raise TrainingCheckpointError(
            f"{folder} has checkpoint version {values.get('version')!r}; this release reads 1"
        )
    return TrainingState(values["step"], values["position"], values["world_size"], values["config"], tensors)
