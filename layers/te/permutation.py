"""Transformer Engine's functions that bring tokens to their experts and back.

Our own models use `te_models.kernels.permute`, and quantize on the way; these are a few operations of torch. Rows
that come quantized, each row with its scales or all with one, are moved as they are, data and scales alike, and
only their rowwise copy is; their gradient is one of values.

T tokens, E experts, K experts per token, R rows sorted by expert, H hidden.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from te_models.kernels.asserted import asserted
from te_models.suggestions import check_choice

from ..quantizer.schema import field_layouts
from ..tensor.quantized_tensor import QuantizedTensor
from .arguments import require_default

MapType = Literal["mask", "index"]


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | None = -1,
    max_token_num: int = -1,
    map_type: MapType = "mask",
) -> tuple[Tensor, Tensor]:
    """Return the rows of inp [T, H] sorted by expert, then by token, [R, H], and the row_id_map for `moe_unpermute`.

    routing_map: [T, E], nonzero where a token goes to an expert ("mask"), or [T, K], the numbers of its experts
    ("index"). num_out_tokens: R, None or -1: all; fewer drop the last ones, more are filled up with zeros. For a mask,
    -1 makes the host wait for the device. ValueError for another map_type or a routing_map of other tokens.
    """
    require_default("max_token_num", max_token_num, -1)
    rows = _rows(inp, routing_map, num_out_tokens, map_type)
    return _taken(inp, rows), rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `moe_permute` for a mask and, between its two results, each row's probability: probs [T, E] -> [R]."""
    rows = _rows(inp, routing_map, num_out_tokens, "mask")
    return _taken(inp, rows), _probabilities(probs, rows), rows


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return `moe_permute_with_probs` for a mask with the rows of every expert filled up with zeros to a multiple of
    align_size: (rows [R, H], probabilities [R], row_id_map, pad_offsets [E], rows of each expert [E] int64).

    tokens_per_expert: [E], how many tokens the mask sends to each. pad_offsets: how many rows of zeros lie before each
    expert's own, None where there are none; the row_id_map knows them, too. The host waits for the device, for how many
    rows there are depends on values. ValueError for other numbers of tokens, and an align_size below 1.
    """
    if align_size < 1:
        raise ValueError(f"align_size is {align_size}; allowed: a positive number of rows")
    rows = _rows(inp, routing_map, None, "mask")
    counts = (routing_map != 0).sum(0)
    if tokens_per_expert.shape != counts.shape or not torch.equal(tokens_per_expert.to(counts), counts):
        raise ValueError(f"tokens_per_expert is {tokens_per_expert.tolist()}; allowed: {counts.tolist()}, by the mask")
    target = (counts + align_size - 1) // align_size * align_size
    offsets = (target - counts).cumsum(0) - (target - counts)
    total = int(target.sum())
    padded = rows.new_tensor([[0], [-1]]).repeat(1, total)
    padded[:, torch.arange(rows.shape[1], device=rows.device) + offsets[rows[1]]] = rows
    aligned = total == rows.shape[1]
    return _taken(inp, padded), _probabilities(probs, padded), padded, None if aligned else offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: MapType = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Return the sum of each token's rows [T, H] of inp [R, H], times merging_probs ([T, E] for a mask, else [T, K]) if
    given; summed in float32. row_id_map: of `moe_permute`, or of `moe_permute_and_pad_with_probs`, whose pad_offsets
    change nothing, for the map has them. restore_shape: (T, H); None: the tokens of merging_probs. ValueError where
    neither says how many tokens there are, for a map of other rows, and for `probs`, the old name of merging_probs,
    beside it. RuntimeError, checked on the device, where the map names a token or an expert that is not there.
    """
    _check(map_type)
    if probs is not None and merging_probs is not None:
        raise ValueError("probs and merging_probs are both given; allowed: merging_probs")
    weights = probs if merging_probs is None else merging_probs
    if restore_shape is None and weights is None:
        raise ValueError("moe_unpermute needs restore_shape, the shape of the tokens, or merging_probs")
    tokens = restore_shape[0] if restore_shape is not None else weights.shape[0]  # type: ignore[union-attr]
    if row_id_map.shape != (2, inp.shape[0]):
        raise ValueError(
            f"row_id_map has shape {tuple(row_id_map.shape)}; allowed: (2, {inp.shape[0]}), the rows of inp"
        )
    token, slot = row_id_map
    known = (token >= 0) & (token < tokens) & (slot >= -1)
    if weights is not None:
        known &= slot < weights.shape[1]
    asserted(known.all(), "row_id_map names tokens or experts that are not there; allowed: what moe_permute returned")
    factors = (slot >= 0).float()
    if weights is not None:
        factors = factors * weights[token, slot.clamp(min=0)].float()
    sums = torch.zeros(tokens, inp.shape[1], dtype=torch.promote_types(inp.dtype, torch.float32), device=inp.device)
    return sums.index_add(0, token, inp.to(sums.dtype) * factors[:, None]).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Return chunks of the rows of inp [R, H] in another order. split_sizes: [C] rows of each chunk; sorted_index: [C],
    the chunk that is first, second, ... Both stay on the device, where their values are checked. ValueError for other
    shapes, RuntimeError for sizes that do not add up to R and for a sorted_index that is no order."""
    return take_rows(inp, _source_rows(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `moe_sort_chunks_by_index` of inp [R, H] and of the probability of each row [R]."""
    source = _source_rows(inp, split_sizes, sorted_index)
    return take_rows(inp, source), probs.index_select(0, source)


def _check(map_type: str) -> None:
    check_choice("map_type", map_type, ("mask", "index"))


def _rows(inp: Tensor, routing_map: Tensor, wanted: int | None, map_type: str) -> Tensor:
    """Return [2, R]: each row's token, and which expert of a mask or which of its K it is for; -1: a row of zeros."""
    _check(map_type)
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        raise ValueError(f"routing_map has shape {tuple(routing_map.shape)}; allowed: {inp.shape[0]} tokens by experts")
    tokens, slots = routing_map.shape
    every = wanted is None or wanted < 0
    if map_type == "index":
        order = torch.argsort(routing_map.flatten(), stable=True)
        rows = torch.stack((order // slots, order % slots))
        count = tokens * slots if every else wanted
    else:
        chosen = routing_map.t().flatten() != 0
        order = torch.argsort(chosen, stable=True, descending=True)
        rows = torch.stack((order % tokens, torch.where(chosen[order], order // tokens, -1)))
        count = int(chosen.sum()) if every else wanted
    rows = rows[:, :count]
    missing = count - rows.shape[1]  # type: ignore[operator]
    return rows if missing <= 0 else torch.cat((rows, rows.new_tensor([[0], [-1]]).expand(2, missing)), dim=1)


def _taken(inp: Tensor, rows: Tensor) -> Tensor:
    token, slot = rows
    return take_rows(inp, token, slot >= 0)


def _probabilities(probs: Tensor, rows: Tensor) -> Tensor:
    token, slot = rows
    return torch.where(slot >= 0, probs[token, slot.clamp(min=0)], 0)


def take_rows(x: Tensor, source: Tensor, used: Tensor | None = None) -> Tensor:
    """Return the rows `source` [R] of x [T, H], plain or quantized; zeros where `used` [R] is False. ValueError for
    quantized rows that share scales with some others."""
    if isinstance(x, QuantizedTensor):
        return _QuantizedRows.apply(x, source, used)
    rows = x.index_select(0, source)
    return rows if used is None else torch.where(used[:, None], rows, 0)


class _QuantizedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: QuantizedTensor, source: Tensor, used: Tensor | None) -> QuantizedTensor:
        ctx.save_for_backward(source, used)
        ctx.shape = x.shape
        x.require_cuttable("be permuted")
        quantizer = x.quantizer
        if "rowwise" not in quantizer.stored_usages() or quantizer.row_block("rowwise") != 1:
            raise ValueError(f"rows of {quantizer} cannot be permuted; allowed: a rowwise copy, with blocks of one row")
        if not quantizer.symmetric:
            quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
        fields = {}
        for layout in field_layouts(quantizer):
            field = x.fields[layout.name]
            if layout.block is not None:  # else the one scale of the matrix
                words = field.view(torch.uint8) if field.dtype.itemsize == 1 else field
                rows = words.index_select(0, source)
                field = (rows if used is None else torch.where(used[:, None], rows, 0)).view(field.dtype)
            fields[layout.name] = field
        return x.wrap(fields, quantizer=quantizer, shape=torch.Size((source.shape[0], x.shape[1])))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,), (source, used) = grads, ctx.saved_tensors
        rows = dy.to(torch.promote_types(dy.dtype, torch.float32))
        rows = rows if used is None else torch.where(used[:, None], rows, 0)
        return rows.new_zeros(ctx.shape).index_add(0, source, rows).to(dy.dtype), None, None


def _source_rows(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Return for each row of the result which row of inp it is."""
    sizes, order = split_sizes.to(inp.device).long(), sorted_index.to(inp.device).long()
    if sizes.dim() != 1 or sizes.shape != order.shape:
        found = f"{tuple(split_sizes.shape)} and {tuple(sorted_index.shape)}"
        raise ValueError(f"split_sizes and sorted_index have shapes {found}; allowed: [C] both")
    asserted(
        (sizes >= 0).all() & (sizes.sum() == inp.shape[0]),
        "split_sizes do not add up to the rows of inp; allowed: numbers from 0 on that do",
    )
    asserted(
        (order.sort().values == torch.arange(order.shape[0], device=order.device)).all(),
        "sorted_index is no order of the chunks; allowed: each chunk's number once, from 0 on",
    )
    begins, sorted_ends = sizes.cumsum(0) - sizes, sizes[order].cumsum(0)
    row = torch.arange(inp.shape[0], device=inp.device)
    chunk = torch.bucketize(row, sorted_ends, right=True).clamp(max=len(order) - 1)
    return begins[order][chunk] + row - (sorted_ends - sizes[order])[chunk]
