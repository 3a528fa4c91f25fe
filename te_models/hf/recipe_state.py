"""What recipes keep, in the checkpoints of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from te_models.layers import load_recipe_state, recipe_state

from ..extras import require

if TYPE_CHECKING:
    import transformers
else:
    transformers = require("transformers", "hf", feature="te_models.hf")


class RecipeStateCallback(transformers.TrainerCallback):
    """Saves the live state of a model's recipes beside Trainer's checkpoints, and reads it when Trainer resumes.

    Trainer keeps weights alone: without this, scales of delayed scaling begin at 1 again, and a run that goes on is
    another one. One file per process, `recipe_state.RANK.safetensors`.

    Example:
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[RecipeStateCallback()])

    Raises ValueError when Trainer resumes from a checkpoint of a run without this.
    """

    def on_save(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        """Write the file of this process."""
        tensors = {name: tensor.clone() for name, tensor in recipe_state(model).items()}
        save_file(tensors, _file(args, state))

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
        load_recipe_state(model, load_file(file))


def _file(args: Any, state: Any) -> Path:
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    return folder / f"recipe_state.{args.process_index}.safetensors"
