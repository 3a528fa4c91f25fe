"""Saving a model that several ranks hold together: the first one writes, and when a tensor's turn comes all ranks do
their part of putting it together, so that a rank's memory holds no more of the model than before, but for that tensor.

The first rank drives: it announces the number of the tensor that it needs, every rank does its part of putting that
one together, and so on until it announces that the files are written, or that they are not.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...memory import return_freed_memory

if TYPE_CHECKING:
    from ..gpt import GPTModel

_WRITTEN, _FAILED = -1, -2


class Collection(ABC):
    """What this rank has of a model, by the names that its tensors have in files, and how they become whole ones.

    first: whether this rank writes. names: in the same order on every rank.
    """

    first: bool
    names: Sequence[str]

    @abstractmethod
    def wholes(self) -> dict[str, Tensor]:
        """Return the tensors that the files will hold, without their data."""

    @abstractmethod
    def announce(self, number: int) -> int:
        """Tell all ranks a number: on the first rank its own; return what the first one has told."""

    @abstractmethod
    def collect(self, number: int) -> Tensor | None:
        """Do this rank's part of putting a tensor together; return it on the first rank, in main memory."""

    def fetch(self, name: str) -> Tensor:
        """Return a whole tensor in main memory; on the first rank, while the others serve."""
        number = self.names.index(name)
        return_freed_memory()  # of the tensor before: the heap keeps it for allocations of its size
        self.announce(number)
        found = self.collect(number)
        assert found is not None, "the first rank puts the parts together"
        return found

    def serve(self) -> int:
        """Send what the first rank asks for, until it announces the end; return what that is."""
        while (number := self.announce(0)) >= 0:
            self.collect(number)
        return number


def save_collected(
    parts: Collection,
    model: GPTModel,
    folder: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a model; called by all of its ranks. folder, source_dir, overwrite: see `save_model`; what the first rank
    says counts. Raises CheckpointError on every rank where the first one cannot write."""
    from te_models.checkpoints import CheckpointError, save_model

    if not parts.first:
        if parts.serve() == _FAILED:
            raise CheckpointError(f"the first rank could not write {os.fspath(folder)}; it says why")
        return
    try:
        save_model(
            parts.wholes(),
            model.config,
            folder,
            source_dir=source_dir,
            source=model.origin,
            fetch=parts.fetch,
            overwrite=overwrite,
        )
    except Exception:
        parts.announce(_FAILED)
        raise
    parts.announce(_WRITTEN)
