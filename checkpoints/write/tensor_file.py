"""One safetensors file of tensors in memory, which appears complete or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..io.atomic import flush
from ..io.dtypes import dtype_name
from ..io.store import MemoryStore
from ..plan.plan import Output
from .shards import Shard, alignment
from .writer import write_weights


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file with the permissions of a new file (under the umask); an existing one stays until it is complete.

    Tensors are on any device and need not be contiguous; every bit is kept. Raises OSError that names the file where it
    cannot be written.
    """
    outputs = [Output(n, dtype_name(t.dtype), tuple(t.shape), compute=_parts(t)) for n, t in tensors.items()]
    partial = path.with_name(f".{path.name}.partial")
    shard = Shard(partial.name, tuple(sorted(outputs, key=alignment)), metadata or {})
    try:
        partial.unlink(missing_ok=True)
        write_weights(path.parent, [shard], MemoryStore({}))
        partial.rename(path)
        flush(path.parent)
    except OSError as error:
        raise OSError(f"{path.name}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _parts(tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    return lambda: [tensor]
