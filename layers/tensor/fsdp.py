"""Sharding with FSDP2 (`torch.distributed.fsdp.fully_shard`): shards are gathered in quantized form.

`fully_shard` cuts a parameter along dimension 0 into shards, each a separate quantized tensor, and gathers the
fields' bytes: one byte a value instead of two or four. By itself it cuts equal shards, between blocks (a weight with
128x128 blocks over 4 ranks has a multiple of 512 rows); anything else is an error. Inside `shards_of_blocks` any number
of rows is cut: each rank has as many whole blocks as the others, the last ranks fewer, and gathers and reductions are
padded.

A format with one scale per matrix needs the same scale in all its shards. Cutting shares it; afterwards a shard that is
requantized reduces its amax over the ranks first (`amax_group`, set at the first gather or by `share_scales`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import resolve_group
from ..quantizer import Quantizer, Usage
from ..quantizer.schema import FieldLayout, cut_multiple
from .high_precision_init import hand_to_shards, part_of_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .quantized_tensor import QuantizedTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor (a DTensor); any other tensor itself."""
    if not dist.is_available():
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether any of these is stored in shards."""
    return any(local_part(tensor) is not tensor for tensor in tensors)


def largest_part(tensor: Tensor) -> int:
    """Return how many elements the largest part of a sharded tensor has that a rank holds; of any other tensor all."""
    if local_part(tensor) is tensor:
        return tensor.numel()
    shape = list(tensor.shape)
    for dim, ranks in _shards(tensor):
        shape[dim] = largest_shard(tensor, shape[dim], ranks)
    return math.prod(shape)


def largest_shard(tensor: Tensor, size: int, ranks: int) -> int:
    """Return how many of `size` indices the largest shard of a sharded tensor has; every rank gets this many in turn
    until none are left: whole blocks where it is quantized."""
    local: Any = local_part(tensor)
    return _largest_of_blocks(local, size, ranks) if hasattr(local, "quantizer") else -(-size // ranks)


def _largest_of_blocks(x: QuantizedTensor, size: int, ranks: int) -> int:
    block = block_rows(x)
    return -(-size // (ranks * block)) * block


def block_rows(x: QuantizedTensor) -> int:
    """Return the multiple of dimension 0 at which shards may begin."""
    return cut_multiple(x.quantizer, -2) if is_one_matrix(x) else 1


def rows_like(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return what belongs to this rank's part of a tensor as a tensor sharded alike, so that a distributed checkpoint
    knows whose it is; `rows` itself where the tensor is not sharded.

    rows: [n, ...], n the same on every rank; they follow one another in rank order.
    """
    if local_part(tensor) is tensor:
        return rows
    from torch.distributed.tensor import DTensor, Shard

    placements = [Shard(0) if hasattr(p, "dim") else p for p in tensor.placements]  # type: ignore[attr-defined]
    return DTensor.from_local(rows, tensor.device_mesh, placements, run_check=False)  # type: ignore[attr-defined]


def _shards(tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield the dimensions along which a DTensor is sharded, each with the number of ranks that share it."""
    for axis, placement in enumerate(tensor.placements):
        if hasattr(placement, "dim"):
            yield placement.dim, tensor.device_mesh.size(axis)


def shared_amaxes(quantizer: Quantizer, x: Tensor, group: Any) -> dict[Usage, Tensor]:
    """Return the amaxes that quantizing x needs, reduced over a process group, by usage. group: it, or its name."""
    # an empty shard takes part, too
    amaxes = quantizer.amaxes(x if x.numel() else x.new_zeros((cut_multiple(quantizer, -2), x.shape[-1])))
    if isinstance(group, str):
        group = resolve_group(group)
    for amax in amaxes.values():
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amaxes


def one_per_matrix(x: QuantizedTensor) -> list[str]:
    """Return the names of the fields that hold one entry per matrix."""
    return [layout.name for layout in x.layouts if layout.block is None]


def is_one_matrix(x: QuantizedTensor) -> bool:
    """Whether dimension 0 is the rows of a matrix, so that shards along it are parts of one matrix."""
    return len(x.matrix_shape) == 2


def share_scales(module: nn.Module) -> None:
    """Let the shards of every quantized weight with one scale per matrix share that scale from now on.

    Call it after `fully_shard` and before values are written into shards (loading, initialising, `init_state` of an
    optimizer) ahead of the first forward pass. That would do it by itself. Shards of weights that were built with
    `preserve_high_precision_init_val` get their rows of that value, too. Collective: none here, one per such write.
    """
    from torch.distributed.tensor import DTensor

    from .quantized_tensor import QuantizedTensor

    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, QuantizedTensor):
            local, mesh = parameter._local_tensor, parameter.device_mesh
            if is_one_matrix(local) and one_per_matrix(local):
                local.amax_group = mesh.get_group(mesh.ndim - 1).group_name
    for part in module.modules():
        hand_to_shards(part, largest_shard)


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Inside, a module's own sharded parameters are whole ones in high precision, without values; at the end each shard
    gets its part of what was written. Every rank writes the same."""
    shards = {name: p for name, p in module.named_parameters(recurse=False) if local_part(p) is not p}
    if shards:
        share_scales(module)
    for name, shard in shards.items():
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=local_part(shard).device)
        module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    try:
        yield
        with torch.no_grad():
            for name, shard in shards.items():
                whole = module._parameters[name]
                assert whole is not None
                local_part(shard).copy_(part_of_shard(whole, shard, largest_shard))  # pyright: ignore[reportArgumentType]
    finally:
        module._parameters.update(shards)


@contextlib.contextmanager
def shards_of_blocks(module: nn.Module) -> Iterator[None]:
    """Inside, `fully_shard(module)` cuts quantized weights with any number of rows, between blocks.

    Their shards are not those that DTensor supposes: torch's functions on whole state dicts do not know them. Raises
    ValueError where this torch's FSDP2 cannot be told of them."""
    from .quantized_tensor import QuantizedTensor

    own = [p for p in module.parameters() if isinstance(p, QuantizedTensor)]
    for parameter in own:
        parameter.unequal_shards = True
    try:
        yield
    finally:
        for parameter in own:
            parameter.unequal_shards = False
    for shard in _fsdp_parameters(module):
        _pad_reductions(shard)


def _fsdp_parameters(module: nn.Module) -> list[Any]:
    """Return torch's records of the parameters that `fully_shard` has made of a module's."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _pad_reductions(shard: Any) -> None:
    """Have FSDP2 reduce a gradient of a weight whose shards are not equal: padded to as many rows on every rank."""
    from .quantized_tensor import QuantizedTensor

    local, ranks = local_part(shard.sharded_param), getattr(shard.mesh_info, "shard_mesh_size", 1)
    if not isinstance(local, QuantizedTensor):
        return
    rows = shard.sharded_param.shape[0]
    each = _largest_of_blocks(local, rows, ranks)
    if each * ranks == rows:
        local.unequal_shards = False
        return
    if not hasattr(shard, "padded_sharded_param_size") or not hasattr(shard, "_get_grad_inner_tensor"):
        raise ValueError(
            f"torch {torch.__version__} shards quantized weights equally; allowed: a number of rows that is a multiple "
            f"of {ranks * block_rows(local)}, and here it is {rows}"
        )
    new: Any = local.clone()  # with separate memory and a separate scale
    new = new.keep_attributes(local)
    new.unequal_shards = True
    shard.sharded_param._local_tensor, shard._sharded_param_data = new, new.view(-1)
    shard.padded_sharded_param_size = new.size()  # what is gathered has its own padding, and nothing else is padded
    inner: Callable[[Tensor], Tensor] = shard._get_grad_inner_tensor

    def padded(gradient: Tensor) -> Tensor:
        found = inner(gradient)
        return torch.cat([found, found.new_zeros((each * ranks - rows, *found.shape[1:]))])

    shard._get_grad_inner_tensor = padded


class GathersQuantized:
    """The two hooks that `fully_shard` looks for on a parameter's local tensor."""

    def fsdp_pre_all_gather(
        self: Any, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return (the bytes of every field, (rows, shards); of one tensor None). ValueError where the shards
        are not equal outside of `shards_of_blocks`, or cut along another dimension than the first."""
        x: QuantizedTensor = self
        hand_to_shards(module, largest_shard)
        ranks = mesh.size()
        if ranks == 1 or _are_copies(outer_size, module):  # nothing is gathered, and torch reads one tensor
            return (pack_fields(x.fields),), None
        if x.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"a {type(x).__name__} of shape {tuple(outer_size)} has shards of shape {tuple(x.shape)}; "
                "allowed: shards along the first dimension, Shard(0)"
            )
        if outer_size[0] % ranks and not x.unequal_shards:
            raise ValueError(
                f"a {type(x).__name__} of shape {tuple(outer_size)} cannot be sharded over {ranks} ranks: its first "
                f"dimension must be a multiple of {ranks}, because torch pads no gathered shards"
            )
        if x.amax_group is None and is_one_matrix(x) and one_per_matrix(x):
            check_scales_are_shared(x, mesh.get_group())
            for shard in (x, *_kept_elsewhere(x, outer_size, module)):
                shard.amax_group = mesh.get_group().group_name
        if not x.unequal_shards:
            return tuple(_bytes(field) for field in x.fields.values()), (outer_size[0], ranks)
        each = _largest_of_blocks(x, outer_size[0], ranks)
        return tuple(_bytes(padded_field(x, layout, each)) for layout in x.layouts), (outer_size[0], ranks)

    def fsdp_post_all_gather(
        self: Any,
        outputs: tuple[Tensor, ...],
        gathered_from: tuple[int, int] | None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole parameter in `dtype` and the tensors it owns, or refill `out`."""
        x: QuantizedTensor = self
        if gathered_from is None:  # the fields of `out` are views of what was filled just now
            return None if out is not None else (x.wrap(unpack_fields(x.fields, outputs[0]), dtype=dtype), ())
        rows, ranks = gathered_from
        fields, owned = {}, []
        for layout, gathered in zip(x.layouts, outputs, strict=True):
            field = getattr(x, layout.name)
            values = gathered.view(-1).view(field.dtype)
            axis, count = entries_of_rows(x, layout, rows)
            if axis is None:
                whole = values[: field.numel()].view(field.shape)
            elif axis == 0:
                whole = values[: count * math.prod(field.shape[1:])].view(count, *field.shape[1:])
            else:  # of a transposed matrix, whose rows are the last dimension
                whole = torch.cat(
                    values.view(ranks, field.shape[0], -1).unbind(), 1
                )  # its own memory, which torch frees
                if whole.shape[1] != count:
                    whole = whole[:, :count].clone(memory_format=torch.contiguous_format)
                owned.append(whole)
            fields[layout.name] = whole
        if out is not None:
            for layout in x.layouts:
                if layout.transposed and is_one_matrix(x):
                    getattr(out, layout.name).copy_(fields[layout.name])
            return None
        shape = torch.Size((rows, *x.shape[1:]))
        return x.wrap(fields, shape=shape, dtype=dtype), tuple(owned)


def entries_of_rows(x: QuantizedTensor, layout: FieldLayout, rows: int) -> tuple[int | None, int]:
    """Return (dimension of a field along which the rows of x are, number of its entries for this number of rows). The
    dimension is None where the field has one entry per matrix."""
    if not is_one_matrix(x):
        return 0, rows
    if layout.block is None:
        return None, 1
    return getattr(x, layout.name).dim() + layout.axis(-2), layout.entries(0, rows, -2)[1]


def padded_field(x: QuantizedTensor, layout: FieldLayout, rows: int) -> Tensor:
    """Return a field of a shard, filled up with zeros to what `rows` rows have."""
    field, (axis, count) = getattr(x, layout.name), entries_of_rows(x, layout, rows)
    if axis is None or field.shape[axis] == count:
        return field
    rest = (*field.shape[:axis], count - field.shape[axis], *field.shape[axis + 1 :])
    raw = field.view(torch.uint8) if field.dtype.itemsize == 1 else field
    return torch.cat([raw, raw.new_zeros(rest)], axis).view(field.dtype)


def _bytes(field: Tensor) -> Tensor:
    """Return a field as contiguous bytes, at least one-dimensional."""
    return field.contiguous().reshape(-1).view(torch.uint8)


def _kept_elsewhere(x: QuantizedTensor, whole: torch.Size, module: nn.Module | None) -> list[QuantizedTensor]:
    """Return the shard that x, of a parameter of shape `whole`, may be a copy of; none where there are several.

    With `CPUOffloadPolicy` parameters stay in main memory, and what is gathered is a new copy on the device each time.
    """
    alike = [p for p in map(local_part, _own(whole, module)) if getattr(p, "quantizer", None) == x.quantizer]
    return alike if len(alike) == 1 else []  # type: ignore[return-value]


def _are_copies(whole: torch.Size, module: nn.Module | None) -> bool:
    """Whether ranks have copies, and no shards, of a parameter of this shape: torch's `replicate`."""
    own = _own(whole, module)
    return bool(own) and all(local_part(p) is not p and not list(_shards(p)) for p in own)


def _own(shape: torch.Size, module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else [p for p in module.parameters(recurse=False) if p.shape == shape]


_ALIGN = 16  # bytes, as GEMMs of eight-bit numbers ask for


def pack_fields(fields: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of all fields one behind the other, as one tensor."""
    parts: list[Tensor] = []
    for field in fields.values():
        parts += [_bytes(field)]
        parts += [parts[-1].new_zeros(-parts[-1].numel() % _ALIGN)]
    return torch.cat(parts)


def unpack_fields(like: Mapping[str, Tensor], data: Tensor) -> dict[str, Tensor]:
    """Undo `pack_fields`: return the fields as views of its bytes. like: fields of these names, shapes and dtypes."""
    fields, begin = {}, 0
    for name, field in like.items():
        size = field.numel() * field.itemsize
        fields[name] = data.view(-1)[begin : begin + size].view(field.dtype).view(field.shape)
        begin += size + -size % _ALIGN
    return fields


def check_scales_are_shared(x: QuantizedTensor, group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank of the group where shards of one matrix were given scales of their own."""
    for name in one_per_matrix(x):
        scale = getattr(x, name).detach().clone()
        low, high = scale.clone(), scale.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group)
        if not torch.equal(low, high):
            raise ValueError(
                f"the shards of a {type(x).__name__} have different scales, because values were written into them "
                "before the first forward pass; call te_models.layers.share_scales(module) after fully_shard"
            )
