"""Weight maps applied to tensors in memory: a state dict in, a state dict under other names and in other pieces out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ..io.boxes import count, full
from ..io.dtypes import torch_dtype
from ..io.store import MemoryStore
from .plan import Output, make_plan
from .stream import fill_tensor, read_piece
from .tensor_map import Namespace


@torch.no_grad()
def convert_tensors(
    tensors: Mapping[str, torch.Tensor],
    source: Namespace,
    target: Namespace,
    *,
    where: str,
    dtype: torch.dtype | None = None,
    unused: Collection[str] = (),
    passthrough: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of `target` made of `tensors`, which are stored as `source` says.

    One that is a whole tensor under another name, or a view of one, shares its memory; others are new, on the device of
    their first piece. unused, passthrough: see `make_plan`. Raises CheckpointError, as for files, where `tensors` are
    not exactly the expected ones.
    """
    store = MemoryStore(tensors)
    plan = make_plan(store.tensors, source, target, where=where, dtype=dtype, unused=unused, passthrough=passthrough)
    return {output.name: _computed(store, output) for output in plan.outputs}


def _computed(store: MemoryStore, output: Output) -> torch.Tensor:
    dtype = torch_dtype(output.dtype)
    first = output.pieces[0]
    if len(output.pieces) == 1 and first.box == full(output.shape):
        return read_piece(store, first).to(dtype)
    out = torch.empty(output.shape, dtype=dtype, device=store.view(first.source).device)
    fill_tensor(store, output.pieces, out, limit=max(1, count(full(output.shape))))
    return out
