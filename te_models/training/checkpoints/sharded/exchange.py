"""What ranks and the first of them tell each other during a save: a failure of one is a failure of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from te_models.checkpoints import CheckpointError

from ...ranks.data_parallel import Ranks


@dataclass(frozen=True)
class Exchange:
    """folder: what is written, for messages. group: of all ranks; None: the default one."""

    folder: Path
    ranks: Ranks
    group: dist.ProcessGroup | None

    def turn(self, own: Callable[[], Any], join: Callable[[list[Any]], list[Any]]) -> Any:
        """Do `own` on each rank, give the results to `join` on the first one, and return there and elsewhere what that
        answers to the rank. Raises CheckpointError on every rank where one of these fails."""
        value, failure = self._attempt(own)
        count = self.ranks.world_size
        found: list[Any] | None = [None] * count if self.ranks.is_main else None
        dist.gather_object((value, failure), found, dst=0, group=self.group)
        answers: list[Any] | None = None
        if found is not None:
            answers, failure = None, next((failure for _, failure in found if failure), None)
            if failure is None:
                answers, failure = self._attempt(lambda: join([value for value, _ in found]))
            answers = [(answer, failure) for answer in answers or [None] * count]
        received: list[Any] = [None]
        dist.scatter_object_list(received, answers, src=0, group=self.group)
        answer, failure = received[0]
        if failure is not None:
            raise CheckpointError(f"writing {self.folder} failed: {failure}")
        return answer

    def _attempt(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        try:
            return work(), None
        except Exception as error:  # told to the other ranks, which wait
            return None, f"rank {self.ranks.rank}: {error}"
