"""Quantizing several matrices at once, as Transformer Engine's `tex.group_quantize` and `tex.bgrad_group_quantize` do.

G members, one after the other in memory. Layers quantize their own rows (`GroupedLinear`); this is for programs that
call these functions themselves.
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from te_models.kernels import quantize as q

from ..quantizer import Quantizer
from ..quantizer.group_offsets import GroupOffsets
from ..tensor.grouped_storage import GroupedTensorStorage
from .mixed_shapes import MixedShapesStorage


def group_quantize(
    tensor: Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: Tensor | None = None,
    last_dims: Tensor | None = None,
    *,
    key: Tensor | None = None,
) -> GroupedTensorStorage | MixedShapesStorage:
    """Quantize num_tensors matrices, each by itself.

    first_dims, last_dims: [G] integer, the rows and the columns of each where they differ. Without either, tensor is
    [G rows, columns]; with first_dims it is [rows of all, columns], and the host does not wait for the device; with
    last_dims it holds rows x last_dims[0] values, then rows x last_dims[1], ..., and has rows as its first size, or
    with both any size. The amaxes that scales come from are kept, as `amax` and `columnwise_amax`. key: for stochastic
    rounding. ValueError for dimensions that do not fit the tensor.
    """
    x = tensor.detach()
    quantizer = cast("Any", quantizer).copy()
    usages: list[str] = [usage for usage, wanted in cast("Any", quantizer).get_usages().items() if wanted]
    if last_dims is not None:
        return _of_shapes(x, quantizer, num_tensors, first_dims, last_dims, key)
    x = x.reshape(-1, x.shape[-1])
    if first_dims is not None:
        if first_dims.shape != (num_tensors,):
            raise ValueError(f"first_dims has shape {tuple(first_dims.shape)}; allowed: ({num_tensors},)")
        fields = quantizer.quantize_rows(x, first_dims, key)
        known = {} if _no_amax(quantizer) else dict.fromkeys(usages, q.grouped_amax(x, first_dims))
        return GroupedTensorStorage(fields, quantizer, x.shape, x.dtype, first_dims, known)
    if x.shape[0] % num_tensors:
        raise ValueError(f"tensor has {x.shape[0]} rows; allowed: a multiple of num_tensors, {num_tensors}")
    stacked = x.view(num_tensors, -1, x.shape[1])
    amaxes = quantizer.amaxes(stacked)
    fields = quantizer.quantize_fields(stacked, key, amaxes or None)
    shared = amaxes | {usage: amaxes["rowwise"] for usage in usages if "rowwise" in amaxes and usage not in amaxes}
    return GroupedTensorStorage(fields, quantizer, stacked.shape, x.dtype, None, shared)


def bgrad_group_quantize(
    tensor: Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: Tensor | None = None,
    last_dims: Tensor | None = None,
    *,
    key: Tensor | None = None,
) -> tuple[GroupedTensorStorage | MixedShapesStorage, Tensor]:
    """Return `group_quantize` and the gradient of each member's bias: the sums over its rows, [G, columns], added in
    float32, in the tensor's dtype. ValueError with last_dims, because they leave no common columns."""
    if last_dims is not None:
        raise ValueError("last_dims are given, so the members' biases have no common size; allowed: None")
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, key=key)
    x = tensor.detach().reshape(-1, tensor.shape[-1])
    if first_dims is None:
        return grouped, x.view(num_tensors, -1, x.shape[1]).float().sum(1).to(x.dtype)
    group = GroupOffsets.of(first_dims, x.shape[0]).group  # G in rows past the last group
    sums = x.new_zeros((num_tensors + 1, x.shape[1]), dtype=torch.float32).index_add_(0, group, x.float())
    return grouped, sums[:num_tensors].to(x.dtype)


def _no_amax(quantizer: Quantizer) -> bool:
    """Whether a format has no amax of a matrix, or stores it as a field."""
    return "amax" in quantizer.PARTS or not quantizer.amaxes(torch.ones(1, 1, dtype=torch.float32, device="cpu"))


def _of_shapes(
    x: Tensor, quantizer: Quantizer, num_tensors: int, first_dims: Tensor | None, last_dims: Tensor, key: Tensor | None
) -> MixedShapesStorage:
    columns = last_dims.tolist()
    rows = [x.shape[0]] * num_tensors if first_dims is None else first_dims.tolist()
    sizes = [r * c for r, c in zip(rows, columns, strict=False)]
    if len(columns) != num_tensors or len(rows) != num_tensors or sum(sizes) != x.numel():
        found = list(zip(rows, columns, strict=False))
        raise ValueError(
            f"first_dims and last_dims say {found}; allowed: {num_tensors} shapes with {x.numel()} values together"
        )
    shapes = list(zip(rows, columns, strict=True))
    storage = MixedShapesStorage(shapes, quantizer, x.dtype, x.device)
    ends = torch.tensor([0, *sizes], device="cpu").cumsum(0).tolist()
    flat = x.reshape(-1)
    for member, shape, (begin, end) in zip(storage.split_into_quantized_tensors(), shapes, pairwise(ends), strict=True):
        member.quantize_(flat[begin:end].view(shape), key=key)
    return storage
