"""One run at a time in a folder: two trainers on one `output_dir` would drop each other's rows and checkpoints."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.atomic import make_folders, remove_empty

from ..config import ConfigError
from ..file_lock import HeldError, locked
from ..terminal import say

LOCK = ".lock"
"""The file in a run's folder that is locked while the run goes on."""


@contextlib.contextmanager
def alone_in(output_dir: Path, key: str = "output_dir") -> Iterator[None]:
    """Hold the lock of a run's folder. The folder is made if need be, and removed again if nothing was written to it.
    Of the ranks of a run the first one calls this. key: what names the folder.

    Raises ConfigError where another run has the folder, naming its process and host."""
    with contextlib.ExitStack() as opened:
        try:
            opened.callback(remove_empty, make_folders(output_dir))
            before = opened.enter_context(locked(output_dir / LOCK))
        except HeldError as error:
            raise ConfigError(
                f"{key} is {output_dir}, where {error.holder} works; wait for it{error.advice}, or choose another {key}"
            ) from None
        except CheckpointError as error:
            raise ConfigError(f"{key} is {output_dir}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{key} is {output_dir}, but {LOCK} in it cannot be locked: {error.strerror}") from None
        if before is not None:
            say(
                f"note: {before} was killed in {output_dir}; if it still works there, locks do not reach this host, "
                "and one of the two has to be ended"
            )
        yield
