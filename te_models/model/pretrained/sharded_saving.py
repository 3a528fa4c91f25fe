"""Saving a model whose parameters FSDP2 keeps in shards; weights stored quantized are put together as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import check_shared, is_one_matrix, local_part, one_per_matrix

from .collected_saving import Collection, save_collected

if TYPE_CHECKING:
    from ..gpt import GPTModel


def save_sharded(model: GPTModel, folder: str | os.PathLike[str], source_dir: str | os.PathLike[str] | None) -> None:
    """Write a sharded model; called by all ranks of its mesh, of which the first one writes. See `save_collected`.

    Raises ValueError where the shards are not of one mesh, or those of a quantized weight are not equal.
    """
    save_collected(_Shards(model), model, folder, source_dir)


class _Shards(Collection):
    """This rank's shards; what is not sharded is on every rank."""

    def __init__(self, model: GPTModel) -> None:
        self._tensors: dict[str, Any] = {name: tensor.detach() for name, tensor in model.stored_tensors()}
        meshes = {t.device_mesh for t in self._tensors.values() if local_part(t) is not t}
        if model.tp_group is not None or model.ep_group is not None or len(meshes) != 1:
            raise ValueError(
                "parameters are sharded over several meshes, or split and sharded; allowed in save_pretrained: a "
                "model that is split over ranks, or sharded over one mesh"
            )
        (self._mesh,) = meshes
        self._place = self._mesh.get_coordinate() or []
        self.first = not any(self._place)
        self._entries = dict(entry for name, t in self._tensors.items() for entry in _entries_of(name, t))
        self.names = list(self._entries)

    def wholes(self) -> dict[str, Tensor]:
        """See `Collection`."""
        from te_models.checkpoints.plan.quantized_format import describe, empty

        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            local = local_part(tensor)
            if isinstance(local, QuantizedTensor):
                found[name] = empty(name, tuple(tensor.shape), describe(local.quantizer, local.dtype), "meta")
            else:
                found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return found

    def announce(self, number: int) -> int:
        """See `Collection`: from the first rank along each dimension of the mesh."""
        message = torch.tensor([number], device=self._mesh.device_type)
        for dim in range(self._mesh.ndim):
            if not any(self._place[dim + 1 :]):
                dist.broadcast(message, group=self._mesh.get_group(dim), group_src=0)
        return int(message)

    @torch.no_grad()
    def collect(self, number: int) -> Tensor | None:
        """See `Collection`."""
        entry, dtype = self._entries[self.names[number]]
        whole = entry if local_part(entry) is entry else entry.full_tensor()
        return whole.view(dtype).cpu() if self.first else None


def _entries_of(name: str, tensor: Any) -> Iterator[tuple[str, tuple[Any, torch.dtype]]]:
    """Yield the names in files, the tensors and their dtypes of a parameter: itself, or the stored fields of a
    quantized one, each sharded as it is, on the device of its mesh, and eight-bit floats as bytes."""
    from te_models.checkpoints.plan.quantized_format import SUFFIXES

    local: Any = local_part(tensor)
    if local is tensor:
        fields = tensor.fields if isinstance(tensor, QuantizedTensor) else {"": tensor}
        yield from ((name + SUFFIXES.get(field, ""), (value, value.dtype)) for field, value in fields.items())
        return
    from torch.distributed.tensor import DTensor, Shard

    local, mesh = local.to(tensor.device_mesh.device_type), tensor.device_mesh  # CPUOffloadPolicy keeps it elsewhere
    if not isinstance(local, QuantizedTensor):
        options = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        yield name, (DTensor.from_local(local, mesh, tensor.placements, **options), local.dtype)
        return
    ranks = tensor.shape[0] // max(1, local.shape[0])
    if local.shape[0] * ranks != tensor.shape[0] or local.shape[1:] != tensor.shape[1:]:
        raise ValueError(f"{name} is quantized and has shards that are not equal, along the first dimension")
    if is_one_matrix(local) and one_per_matrix(local):
        check_shared(local, mesh.get_group(mesh.ndim - 1))
    for layout in local.layouts:
        field = getattr(local, layout.name)
        if is_one_matrix(local) and layout.block is None:  # a number that all shards share
            yield name + SUFFIXES[layout.name], (field, field.dtype)
            continue
        dim = 1 if is_one_matrix(local) and layout.transposed else 0
        placements = [Shard(dim) if hasattr(p, "dim") else p for p in tensor.placements]
        values = field.view(torch.uint8) if field.dtype.itemsize == 1 else field
        sharded = DTensor.from_local(values, mesh, placements, run_check=False)
        yield name + SUFFIXES[layout.name], (sharded, field.dtype)
