"""Local steps (DiLoCo, A. Douillard et al., arXiv 2311.08105): each rank, or `replica_ranks` that average their
gradients, is a replica that steps alone, and every `inner_steps` of them an outer optimizer moves the weights that all
replicas begin again with.

The outer gradient g is the mean over the replicas of how far each has moved. Nesterov's momentum follows it, as in
torch.optim.SGD: v <- mu v + g, w <- w - lr (g + mu v), in float32. Each replica's inner optimizer keeps its state.

What replicas do not share is in a checkpoint under each one's number, `replica.0.weight.NAME` and
`replica.0.optimizer.NAME.KEY`; `outer.weight.NAME` and `outer.momentum.NAME` are of all. The model of a checkpoint has
the outer weights, and so has whatever is measured or exported.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.parts import LocalPart
from ..checkpoints.checks import TrainingCheckpointError
from ..config import DiLoCoConfig
from ..ranks.data_parallel import Ranks, mean_over_ranks
from .adamw import Optimizer

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import TrainingState


class OuterOptimizer:
    """The weights that replicas began their inner steps with, and what moves them.

    optimizer: the inner one, whose parameters are this replica's. ranks: of all replicas, over which means are means
    over replicas, because each has equally many. replica: this rank's place in its own. Collective.
    """

    def __init__(self, config: DiLoCoConfig, optimizer: Optimizer, ranks: Ranks) -> None:
        self.config, self.optimizer, self.ranks, self.replica = config, optimizer, ranks, Ranks()
        if config.replica_ranks > 1:
            group, _ = dist.new_subgroups(config.replica_ranks)
            assert isinstance(group, dist.ProcessGroup)
            place = {"rank": group.rank(), "world_size": group.size(), "group": group}
            self.replica = dataclasses.replace(ranks, owns_group=False, **place)
        self.number = ranks.rank // config.replica_ranks
        self.weights = {name: value.clone() for name, value in self._wide().items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.weights.items()}

    def _wide(self) -> dict[str, Tensor]:
        """Return this replica's weights in float32: masters, where there are any."""
        masters = self.optimizer.masters
        return {name: masters.get(name, p).detach().float() for name, p in self.optimizer.parameters.items()}

    @torch.no_grad()
    def after(self, step: int) -> bool:
        """Move the weights if this step ends a round, and return whether it does; called by all replicas."""
        if step % self.config.inner_steps:
            return False
        for name, own in self._wide().items():
            gradient = mean_over_ranks(self.weights[name] - own, self.ranks)
            velocity = self.momentum[name].mul_(self.config.outer_momentum).add_(gradient)
            self.weights[name].sub_((gradient + self.config.outer_momentum * velocity) * self.config.outer_lr)
        self._take(self.weights)
        return True

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        masters = self.optimizer.masters
        for name, parameter in self.optimizer.parameters.items():
            parameter.copy_(weights[name])
            if name in masters:
                masters[name].copy_(weights[name])

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the model be the outer weights inside, and then again this replica's."""
        with torch.no_grad():
            own = {name: value.clone() for name, value in self._wide().items()}
            self._take(self.weights)
        try:
            yield
        finally:
            with torch.no_grad():
                self._take(own)

    def state(self) -> dict[str, LocalPart]:
        """Return what a checkpoint holds beside the model and the inner optimizer of the first replica; called outside
        `averaged`."""
        own = {f"weight.{name}": value.clone() for name, value in self._wide().items()}
        own |= self.optimizer.state_tensors()
        found = {f"replica.{self.number}.{name}": value for name, value in own.items()}
        shared = (("weight", self.weights), ("momentum", self.momentum))
        found |= {f"outer.{kind}.{name}": value for kind, values in shared for name, value in values.items()}
        return {name: LocalPart.undivided(value) for name, value in found.items()}

    @torch.no_grad()
    def restore(self, start: TrainingState) -> None:
        """Take over the state of a checkpoint whose model and inner optimizer have been read. A replica that the
        checkpoint does not know begins with the outer weights; of a run without local steps all do, with no momentum.

        Raises TrainingCheckpointError for state of another model.
        """
        self.weights = {name: value.clone() for name, value in self._wide().items()}
        if start.parts is None:
            return
        from ..checkpoints.sharded.checkpoint import read_wholes

        saved = read_wholes(start.parts, "outer.")
        if not saved:
            return
        for kind, values in (("weight", self.weights), ("momentum", self.momentum)):
            for name, value in values.items():
                value.copy_(_of(saved, f"outer.{kind}.{name}", value, start.parts))
        self._take(self.weights)
        prefix = f"replica.{self.number}."
        own = {name.removeprefix(prefix): value for name, value in read_wholes(start.parts, prefix).items()}
        if own:
            self.optimizer.load_state_tensors(own)
            self._take({name: _of(own, f"weight.{name}", value, start.parts) for name, value in self.weights.items()})


def _of(saved: Mapping[str, Tensor], name: str, like: Tensor, folder: Path) -> Tensor:
    found = saved.get(name)
    if found is None or found.shape != like.shape:
        what = "nothing" if found is None else f"shape {list(found.shape)}"
        raise TrainingCheckpointError(f"{folder} holds {what} as {name!r}; allowed: shape {list(like.shape)}")
    return found
