"""A checkpoint's tensors under other names, and without rows that only fill up: a store of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from te_models.lazy import torch

from ..io.boxes import Box
from ..io.errors import CheckpointError
from ..io.header import TensorInfo, byte_count
from ..io.store import ComputedStore, Store
from ..mapping.tensor_map import TensorSpec

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class RenamedStore(ComputedStore):
    """names: as they are read -> as they are stored. tensors: as they are read."""

    store: Store
    names: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self.store.read(self.names[name], box)


def common_prefix(names: Collection[str], core: str) -> str:
    """Return what all names of a model begin with, before the name that ends in `core`; "" where it is that name."""
    found = sorted({name.removesuffix(core) for name in names if name.endswith(core) and "optim" not in name})
    if len(found) > 1:
        raise CheckpointError(f"{core} is there several times, as {', '.join(p + core for p in found[:4])}")
    return found[0] if found else ""


def without_padding(tensors: Mapping[str, TensorInfo], expected: Mapping[str, TensorSpec]) -> dict[str, TensorInfo]:
    """Return what tensors are where a vocabulary that was filled up, so that ranks divide it, ends where the model's
    does."""
    found = dict(tensors)
    for name, stored in expected.items():
        info = tensors.get(name)
        if info is None or not name.endswith(_PADDED) or info.shape[1:] != stored.shape[1:]:
            continue
        if info.shape[0] > stored.shape[0]:
            found[name] = TensorInfo(info.dtype, stored.shape, 0, byte_count(info.dtype, stored.shape))
    return found
