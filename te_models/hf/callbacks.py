"""Callbacks for transformers' Trainer: recipe state in its checkpoints, and auxiliary-loss-free balance of experts."""

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_models.checkpoints.io.store import read_tensors
from te_models.checkpoints.write.writer import write_tensors
from te_models.layers import load_recipe_state, recipe_state

from ..extras import require
from ..model.moe.expert_bias import UPDATE_RATE, biases_and_counts, check_rate, update_expert_bias

if TYPE_CHECKING:
    import transformers
else:
    transformers = require("transformers", "hf", feature="te_models.hf")


class RecipeStateCallback(transformers.TrainerCallback):
    """Saves the live state of a model's recipes beside Trainer's checkpoints, and reads it when Trainer resumes.

    Trainer keeps weights alone: without this, scales of delayed scaling begin at 1 again, and a run that goes on is
    another one. One file per process, `recipe_state.RANK.safetensors`, with a SHA-256 of each tensor in its metadata.

    Example:
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[RecipeStateCallback()])

    Raises ValueError when Trainer resumes from a checkpoint of a run without this, and for a file that is not as it was
    written: damaged, edited, or without one of its tensors.
    """

    def on_save(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        """Write the file of this process."""
        tensors = {name: tensor.clone() for name, tensor in recipe_state(model).items()}
        write_tensors(_file(args, state), tensors, {_DIGESTS: json.dumps(_digests(tensors))})

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        """Read it, where training goes on from a checkpoint."""
        if state.global_step == 0:
            return
        file = _file(args, state)
        if not file.is_file():
            raise ValueError(
                f"{file} is missing; allowed: to resume from a checkpoint in output_dir that a Trainer with "
                "RecipeStateCallback has saved, with as many processes, or without this callback"
            )
        load_recipe_state(model, _read(file))


_DIGESTS = "sha256"
"""The entry of the file's metadata: name -> digest, as JSON. Files of earlier releases have none."""


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of dtype, shape and data of each tensor."""
    found = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        data = ctypes.string_at(own.data_ptr(), own.nbytes)
        found[name] = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + data).hexdigest()
    return found


def _read(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; ValueError where they are not those that were written."""
    try:
        tensors, metadata = read_tensors(file)
        digests = json.loads(metadata.get(_DIGESTS, "null"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    found = _digests(tensors)
    if digests is not None and digests != found:
        known = digests if isinstance(digests, dict) else {}
        name = next(iter(name for name in {**known, **found} if known.get(name) != found.get(name)), _DIGESTS)
        raise ValueError(f"{file} is not as it was written: {name!r} was changed, lost or added")
    return tensors


def _file(args: Any, state: Any) -> Path:
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    return folder / f"recipe_state.{args.process_index}.safetensors"


class ExpertBiasCallback(transformers.TrainerCallback):
    """Calls `te_models.update_expert_bias` after each optimizer step of Trainer, on all of its processes.

    A step that the gradient scaler of float16 skips moves nothing. The biases are part of Trainer's checkpoints, as all
    weights are.

    rate: by how much each step moves each bias.

    Example:
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[ExpertBiasCallback(1e-3)])

    Raises ValueError for a negative or infinite rate, and when training begins, for a model without expert bias.
    """

    def __init__(self, rate: float = UPDATE_RATE) -> None:
        check_rate(rate)
        self.rate = rate

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        """Look for the biases now, and not after the first step."""
        biases_and_counts(model)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Update the biases."""
        skipped = getattr(optimizer, "step_was_skipped", False)  # accelerate's wrapper knows
        update_expert_bias(model, 0.0 if skipped else self.rate)
