"""How a run saves and is restored, whatever its layout: whole checkpoints, or sharded ones where ranks have parts.

Where every rank has the whole model, at most without a part of the experts, the first rank writes a whole checkpoint.
Where layers are split or sharded, every rank writes its own part. Each kind is read in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...model import GPTModel
from ...parallel.parts import ModelParts
from ...parallel.sharding import reshard
from ..optimizer.adamw import Optimizer
from ..ranks.data_parallel import Ranks, gather_tensors
from ..ranks.layout import Layout
from ..seeding import random_state
from .checkpoint import TrainingState, export_model, save_checkpoint
from .checks import MODEL
from .files import checkpoint_dir


@dataclass(frozen=True)
class Saving:
    """What is saved of a run. model_path: the folder that training began with; checkpoint: what it continues from."""

    output_dir: Path
    model: GPTModel
    optimizer: Optimizer
    layout: Layout
    ranks: Ranks
    model_path: str | None
    checkpoint: Path | None

    @property
    def _origin(self) -> str | None:
        """The folder that has the tokenizer and the other small files of the model."""
        inside = None if self.checkpoint is None else self.checkpoint / MODEL
        return str(inside) if inside is not None and inside.is_dir() else self.model_path

    @property
    def _takes_part(self) -> bool:
        """Whether this rank has a part of what a whole checkpoint holds."""
        experts = self.optimizer.experts
        return self.ranks.is_main if experts is None else experts.saves

    def restore(self, start: TrainingState) -> None:
        """Take over what a checkpoint holds of the optimizer, and of a sharded one the weights.

        Raises TrainingCheckpointError where it is not of this model."""
        if start.parts is not None:
            from .sharded.checkpoint import load_parts

            load_parts(start.parts, self._parts())
        elif self.layout.dims.is_whole:
            self.optimizer.load_state_tensors(start.tensors)
        else:
            self.optimizer.load_whole_state(start.tensors, ModelParts(self.model))

    def _parts(self) -> dict[str, Any]:
        """Return this rank's parts of weights and optimizer state, by the names that they have in checkpoints."""
        reshard(self.model)
        own = ModelParts(self.model)
        weights = {f"model.{name}": part for name, part in own.stored().items()}
        return weights | self.optimizer.parts(own)

    def save(self, values: Mapping[str, Any], recipe: Mapping[str, torch.Tensor], *, keep_last: int) -> None:
        """Write a checkpoint; called by all ranks. values: step, position, data_digest and config of the run. recipe:
        this rank's live state of the recipe. Raises CheckpointError, and leaves nothing of it, where that fails."""
        ranks = self.ranks
        if not self.layout.dims.is_whole:
            from .sharded.checkpoint import private_states, save_parts

            parts = self._parts() | private_states(random_state(), "rng", ranks.rank)
            parts |= private_states(recipe, "recipe", ranks.rank)
            counts = {"world_size": ranks.world_size, "data_ranks": self.layout.data.world_size}
            save_parts(self.output_dir, self.model, parts, {**values, **counts}, ranks, keep_last=keep_last)
            return
        tensors = self.optimizer.whole_state_tensors() if self._takes_part else {}
        tensors |= {f"rng.{name}": t for name, t in gather_tensors(random_state(), ranks).items()}
        tensors |= {f"recipe.{name}": t for name, t in gather_tensors(dict(recipe), ranks).items()}
        if ranks.is_main:
            state = TrainingState(tensors=tensors, world_size=ranks.world_size, **values)
            save_checkpoint(self.output_dir, self.model, state, origin=self._origin, keep_last=keep_last)
        elif self._takes_part:  # the main rank writes its experts, too
            export_model(self.model, self.output_dir, self.output_dir, self._origin)

    def export(self, folder: Path, step: int) -> None:
        """Write the trained model as an ordinary folder; called by all ranks. step: of the newest checkpoint."""
        if not self.layout.dims.is_whole:
            from .sharded.checkpoint import export_parts

            if self.ranks.is_main:
                export_parts(checkpoint_dir(self.output_dir, step), self.model, folder, self._origin)
        elif self._takes_part:
            export_model(self.model, folder, self.output_dir, self._origin)
