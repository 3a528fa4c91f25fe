"""How a run saves and is restored, whatever its layout: whole checkpoints, or sharded ones where ranks have parts.

Where every rank has the whole model, at most without a part of the experts, the first rank writes a whole checkpoint.
Where layers are split or sharded, every rank writes its own part. Each kind is read in every layout.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_models.checkpoints import save_model

from ...model import GPTModel
from ...model.parallel import free_gathered_parameters
from ...parallel.parts import LocalPart, ModelParts
from ...terminal import say
from ..lora import ADAPTER_HF, ADAPTERS, Adapters
from ..optimizer.adamw import Optimizer
from ..ranks.data_parallel import Ranks, barrier, gather_tensors
from ..ranks.layout import RankLayout
from ..seeding import random_state
from .background import PATIENCE, BackgroundWriter, host_copies
from .checkpoint import TrainingState, export_model, export_tensors, save_checkpoint
from .checks import MODEL
from .files import checkpoint_dir
from .fp8_moments import load_pieces, load_whole, moment_fields
from .recipes import PREFIX, LayerState, whole_entries


@dataclass(frozen=True)
class Saving:
    """What is saved of a run. model_path: the folder that training began with; checkpoint: what it continues from.
    writer: writes checkpoints while the run goes on; None: `save` returns when they are written. group: of all ranks,
    for what they exchange meanwhile. adapters: what is trained in place of the weights."""

    output_dir: Path
    model: GPTModel
    optimizer: Optimizer
    layout: RankLayout
    ranks: Ranks
    model_path: str | None
    checkpoint: Path | None
    writer: BackgroundWriter | None = None
    group: dist.ProcessGroup | None = None
    adapters: Adapters | None = None

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
        with self.optimizer.averaged():
            self._restore(start)

    def _restore(self, start: TrainingState) -> None:
        if start.parts is not None:
            from .sharded.checkpoint import check_known, load_parts

            own = self._own()
            parts = self._parts(own)
            check_known(start.parts, parts, own.names())
            load_parts(start.parts, parts)
            load_pieces(start.parts, self.optimizer, own)
        else:
            own = ModelParts(self.model)
            if self.layout.dims.is_whole and not self.optimizer.is_shared:
                self.optimizer.load_state_tensors(start.tensors)
            else:
                self.optimizer.load_whole_state(start.tensors, own)
                load_whole(start.tensors, self.optimizer, own)
            if self.adapters is not None:
                self.adapters.load_state_tensors(start.tensors, own)

    def _own(self) -> ModelParts:
        """Return what says which parts of the model this rank has."""
        free_gathered_parameters(self.model)
        return ModelParts(self.model)

    def _parts(self, own: ModelParts) -> dict[str, Any]:
        """Return this rank's parts of weights and optimizer state, by the names that they have in checkpoints."""
        weights = {f"model.{name}": part for name, part in own.stored().items()}
        weights |= {f"{ADAPTERS}{name}": part for name, part in own.adapters().items()}
        return weights | self.optimizer.parts(own)

    def save(
        self,
        values: Mapping[str, Any],
        recipe: Mapping[str, LayerState],
        *,
        keep_last: int,
        replicas: Mapping[str, LocalPart] | None = None,
    ) -> None:
        """Write a checkpoint, or begin to; called by all ranks. values: step, position, data_digest and config of the
        run. recipe: this rank's live state of the recipes. replicas: what `OuterOptimizer.state` returns, of local
        steps. Raises CheckpointError, and leaves nothing of it, where that fails; where `writer` writes, the next call,
        `check` or `finish` does."""
        if self.writer is not None:
            self.writer.finish()
        work = self._work(values, recipe, keep_last, replicas or {})
        if self.writer is not None:
            self.writer.start(work)
        else:
            work()
            barrier(self.ranks)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written; wait for none."""
        if self.writer is not None:
            self.writer.check()

    def finish(self) -> None:
        """Return when the last checkpoint is complete, on all ranks; called by all."""
        if self.writer is not None:
            self.writer.finish()
            barrier(self.ranks)

    def leave(self) -> None:
        """Wait for the checkpoint that is being written, at the end of a run that may have failed."""
        if self.writer is not None:
            with contextlib.suppress(Exception):
                self.writer.finish(PATIENCE if self._divided else None)

    @property
    def _divided(self) -> bool:
        """Whether every rank writes its own part: also of distributed experts, where a thread writes them, because they
        would have to be sent to the first rank while other collectives run."""
        return (
            self._exports_parts
            or self.optimizer.is_shared
            or (self.writer is not None and self.layout.dims.expert_model_parallel_size > 1)
        )

    @property
    def _exports_parts(self) -> bool:
        """Whether the first rank puts the model together from the parts in a checkpoint: no rank has it whole, or has
        the adapters of all experts."""
        dims = self.layout.dims
        return not dims.is_whole or (self.adapters is not None and dims.expert_model_parallel_size > 1)

    def _work(
        self,
        values: Mapping[str, Any],
        recipe: Mapping[str, LayerState],
        keep_last: int,
        replicas: Mapping[str, LocalPart],
    ) -> Callable[[], object]:
        """Return what writes a checkpoint of the present state, whenever it is called if `writer` calls it."""
        ranks, output_dir = self.ranks, self.output_dir
        own_copies: Any = dict if self.writer is None else host_copies
        if self._divided or replicas:
            from .sharded.checkpoint import private_states, save_parts

            own = self._own()
            parts = self._parts(own) | moment_fields(self.optimizer, own) | dict(replicas)
            parts |= private_states(random_state(), "rng", ranks.rank)
            parts |= {PREFIX + name: own.part(self.layout.dims, ranks.rank) for name, own in recipe.items()}
            parts = own_copies(parts)
            counts = {"world_size": ranks.world_size, "data_ranks": self.layout.data.world_size}
            whole, group = {**values, **counts}, self.group
            return lambda: save_parts(output_dir, self.model, parts, whole, ranks, keep_last=keep_last, group=group)
        tensors = self.optimizer.whole_state_tensors() if self._takes_part else {}
        tensors |= {f"rng.{name}": t for name, t in gather_tensors(random_state(), ranks).items()}
        of_ranks = gather_tensors({name: own.tensor for name, own in recipe.items()}, ranks)
        origin = self._origin
        if not ranks.is_main:
            if not self._takes_part:
                return lambda: None
            return lambda: export_model(self.model, output_dir, output_dir, origin)  # the main rank writes its experts
        tensors |= whole_entries(recipe, of_ranks, self.layout.dims)
        weights = None if self.writer is None else dict(self.model.stored_tensors())
        if self.adapters is not None:
            tensors |= self.adapters.state_tensors()
            weights = self.adapters.base_tensors()
        state = TrainingState(tensors=own_copies(tensors), world_size=ranks.world_size, **values)
        if weights is None:
            export = partial(export_model, self.model, output_dir=output_dir, origin=origin)
        else:
            whole = own_copies(weights), self.model.config
            export = partial(export_tensors, *whole, output_dir=output_dir, origin=origin)
        return lambda: save_checkpoint(output_dir, export, state, keep_last=keep_last)

    def _newest(self, step: int) -> Path:
        """Return the checkpoint of a step: the run's, or the one elsewhere that it began with and had no step to add
        to."""
        own = checkpoint_dir(self.output_dir, step)
        return self.checkpoint if self.checkpoint is not None and not own.exists() else own

    def export_averages(self, folder: Path, step: int) -> None:
        """Write the model with the optimizer's float32 averages in place of what they are averages of; called by all
        ranks. step: of the newest checkpoint."""
        if not self.layout.dims.is_whole or self.optimizer.is_shared:
            from .sharded.checkpoint import export_parts

            if self.ranks.is_main:
                export_parts(self._newest(step), self.model, folder, self._origin, averages=True)
            return
        if not self._takes_part:
            return
        experts, averages = self.optimizer.experts, self.optimizer.averages
        by_parameter = {id(p): averages[name] for name, p in self.optimizer.parameters.items()}
        tensors = {name: by_parameter.get(id(tensor), tensor) for name, tensor in self.model.stored_tensors()}
        with torch.no_grad():
            for name, tensor in self.model.stored_tensors() if experts is not None else ():
                if experts is not None and experts.owns(tensor):
                    tensors[name] = experts.whole(tensors[name].detach())
            if self.ranks.is_main:
                save_model(tensors, self.model.config, folder, source_dir=self._origin, overwrite=True)

    def export(self, folder: Path, step: int) -> None:
        """Write the trained model as an ordinary folder; called by all ranks. step: of the newest checkpoint."""
        adapters, newest = self.adapters, self._newest(step)
        if adapters is not None and self._exports_parts and self.ranks.is_main:
            from .sharded.checkpoint import read_wholes

            adapters = adapters.of_whole_model(read_wholes(newest, ADAPTERS))
        if adapters is not None and self.ranks.is_main:
            note = adapters.save(self.output_dir)
            if note is not None:
                say(f"note: there is no {ADAPTER_HF}/ for transformers' model: {note}")
        if self._exports_parts:
            from .sharded.checkpoint import export_parts

            if self.ranks.is_main:
                merged = None if adapters is None else adapters.merged_weights()
                export_parts(newest, self.model, folder, self._origin, merged=merged)
            return
        if adapters is not None:
            adapters.merge()
        if self._takes_part:
            export_model(self.model, folder, self.output_dir, self._origin)
