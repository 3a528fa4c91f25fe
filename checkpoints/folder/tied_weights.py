"""Tied weights: files that repeat the embedding as the output layer, or both of them in layers that predict further
tokens and share them.

With tied embeddings the output layer is the embedding, and transformers stores it once. Some published files store it
twice. The copy may be left out only if it is one: a different `lm_head.weight` means that flag or file is wrong. Our
folders note its name (`HFSource.tied_copies`), and an export as the same family writes it again.
"""

from collections.abc import Mapping

from te_models.config import ModelConfig

from ..families import Family
from ..io.buffers import CHUNK_BYTES
from ..io.errors import CheckpointError
from ..io.header import TensorInfo
from ..io.store import FileStore
from .te_folder import HFSource


def tied_copies(config: ModelConfig, tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, str]:
    """Return copy -> original for the stored tensors that may only repeat another one."""
    return {copy: original for copy, original in _pairs(config, family) if copy in tensors and original in tensors}


def copies_in_export(config: ModelConfig, source: HFSource | None, target: Family, form: str | None) -> dict[str, str]:
    """Return copy -> original for the copies in the files that the model came from, if `target` is their family."""
    if source is None or source.family != target.model_type:
        return {}
    stored = target.namespace(config, form).stored
    return {
        copy: original for copy, original in _pairs(config, target) if copy in source.tied_copies and original in stored
    }


def _pairs(config: ModelConfig, family: Family) -> list[tuple[str, str]]:
    return [pair for names in (family.names, *family.other_names) for pair in names.copies(config)]


def shared_copies(config: ModelConfig, family: Family) -> dict[str, str]:
    """Return copy -> original for the tensors of blocks that layers share, in each further layer that uses one."""
    return {
        copy: original
        for names in (family.names, *family.other_names)
        for copy, original in names.shared_copies(config)
    }


def check_tied_copies(store: FileStore, copies: Mapping[str, str]) -> None:
    """Raise CheckpointError unless every copy equals its original bit for bit."""
    for copy, original in copies.items():
        a, b = store.tensors[copy], store.tensors[original]
        same = (a.dtype, a.shape) == (b.dtype, b.shape) and _same_bytes(store, copy, original, a.nbytes)
        if not same:
            shared = "tie_word_embeddings is true" if copy.count(".") == 1 else "layers share weights"
            raise CheckpointError(f"{shared}, but {copy!r} differs from {original!r}")


def _same_bytes(store: FileStore, a: str, b: str, nbytes: int) -> bool:
    left, right = bytearray(CHUNK_BYTES), bytearray(CHUNK_BYTES)
    for begin in range(0, nbytes, CHUNK_BYTES):
        n = min(CHUNK_BYTES, nbytes - begin)
        store.read_into(a, begin, memoryview(left)[:n])
        store.read_into(b, begin, memoryview(right)[:n])
        if left[:n] != right[:n]:
            return False
    return True
