"""Tied embeddings: files that repeat the embedding as the output layer.

With tied embeddings the output layer is the embedding, and transformers stores it once. Some published files store it
twice. The copy may be left out only if it is one: a different `lm_head.weight` means that flag or file is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_models.config import ModelConfig

from .buffers import CHUNK_BYTES
from .errors import CheckpointError
from .families import Family
from .header import TensorInfo
from .store import FileStore


def tied_copies(config: ModelConfig, tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, str]:
    """Return copy -> original for the stored tensors that may only repeat another one."""
    if not config.embedding.share_embeddings_and_output_weights:
        return {}
    pairs = ((f"{n.output}.weight", f"{n.embedding}.weight") for n in (family.names, *family.other_names))
    return {copy: original for copy, original in pairs if copy in tensors and original in tensors}


def check_tied_copies(store: FileStore, copies: Mapping[str, str]) -> None:
    """Raise CheckpointError unless every copy equals its original bit for bit."""
    for copy, original in copies.items():
        a, b = store.tensors[copy], store.tensors[original]
        same = (a.dtype, a.shape) == (b.dtype, b.shape) and _same_bytes(store, copy, original, a.nbytes)
        if not same:
            raise CheckpointError(f"tie_word_embeddings is true, but {copy!r} differs from {original!r}")


def _same_bytes(store: FileStore, a: str, b: str, nbytes: int) -> bool:
    left, right = bytearray(CHUNK_BYTES), bytearray(CHUNK_BYTES)
    for begin in range(0, nbytes, CHUNK_BYTES):
        n = min(CHUNK_BYTES, nbytes - begin)
        store.read_into(a, begin, memoryview(left)[:n])
        store.read_into(b, begin, memoryview(right)[:n])
        if not torch.equal(
            torch.frombuffer(left, dtype=torch.uint8)[:n], torch.frombuffer(right, dtype=torch.uint8)[:n]
        ):
            return False
    return True
