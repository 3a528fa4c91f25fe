"""State dicts in one piece: a file that `torch.save` wrote, read without unpickling, or safetensors files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from te_models.lazy import torch

from ..io.boxes import Box
from ..io.dtypes import dtype_name
from ..io.errors import CheckpointError, quote
from ..io.header import TensorInfo, byte_count
from ..io.store import ComputedStore, FileStore
from ..io.weight_files import open_weights, plain_file
from .legacy import KNOWN
from .plain_pickle import Record
from .torch_file import TensorRef, open_torch_file

EXTRA_STATE = "_extra_state"
TORCH_FILES = (".pt", ".pth", ".bin")
_BELOW = ("model", "state_dict", "module")
"""Under which of these a training script may have put the state dict."""


class TorchFileStore(ComputedStore):
    """The tensors of a state dict in a file of torch's."""

    def __init__(self, path: Path) -> None:
        self._fd, self._file = open_torch_file(path, path.name, KNOWN)
        try:
            self._refs = _refs(self._file.value, path.name)
        except BaseException:
            os.close(self._fd)
            raise
        self.tensors: dict[str, TensorInfo] = {}
        for name, ref in self._refs.items():
            kind = dtype_name(getattr(torch, ref.dtype))
            self.tensors[name] = TensorInfo(kind, ref.shape, 0, byte_count(kind, ref.shape))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._file.read(self._refs[name], box)


def _refs(value: Any, where: str) -> dict[str, TensorRef]:
    held = value
    while isinstance(held, dict) and not any(isinstance(item, TensorRef) for item in held.values()):
        inner = next((held[key] for key in _BELOW if isinstance(held.get(key), dict)), None)
        if inner is None:
            break
        held = inner
    found: dict[str, TensorRef] = {}
    for name, item in held.items() if isinstance(held, dict) else ():
        if isinstance(item, TensorRef) and isinstance(name, str):
            found[name] = item
        elif isinstance(item, Record) and isinstance(name, str) and not name.endswith(EXTRA_STATE):
            raise CheckpointError(
                f"{where} holds {quote(name)} as {item.kind.rpartition('.')[2]}, which is not read; allowed: plain "
                "tensors (in Transformer Engine: the state dict of dequantized parameters)"
            )
    if not found:
        raise CheckpointError(f"{where} holds no state dict: tensors by name, at the top or under {', '.join(_BELOW)}")
    return found


def is_state_dict(path: Path) -> bool:
    """Whether a path is a file that may hold a state dict."""
    return path.is_file() and path.suffix in (*TORCH_FILES, ".safetensors")


def open_state_dict(path: Path) -> FileStore | TorchFileStore:
    """Open a file with a state dict, or a folder of safetensors files."""
    if path.is_dir():
        return open_weights(path)
    if path.suffix == ".safetensors":
        return FileStore({path.name: plain_file(path.parent, path.name)})
    return TorchFileStore(path)
