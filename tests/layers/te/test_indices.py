"""Indices that are not there are an error in one sentence: none is clamped, and none counts from the end."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import te_models.layers as te

POSITIONS = "cu_seqlens or start_positions ask for positions that freqs does not have; allowed: 0 to 3"


def rotated(qkv_format: str, start: list[int] | None = None, cu_seqlens: list[int] | None = None) -> Tensor:
    """Rotate eight rows by four positions."""
    shape = (8, 2, 8) if qkv_format == "thd" else (4, 2, 2, 8) if qkv_format == "bshd" else (2, 4, 2, 8)
    x, freqs = torch.ones(shape), te.RotaryPositionEmbedding(8)(4)
    more = {"start_positions": start, "cu_seqlens": cu_seqlens}
    tensors = {name: torch.tensor(value) for name, value in more.items() if value is not None}
    return te.apply_rotary_pos_emb(x, freqs, qkv_format, **tensors)


@pytest.mark.parametrize("start", [[0, 0, 3, 0], [0, 0, -1, 0]])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_positions_of_sequences(qkv_format: str, start: list[int]) -> None:
    with pytest.raises(RuntimeError, match=POSITIONS):
        rotated(qkv_format, start)
    rotated(qkv_format, [0, 1, 2, 0])


@pytest.mark.parametrize(
    "cu_seqlens, start",
    [([0, 8], None), ([0, 3, 8], None), ([2, 4, 8], None), ([0, 4, 8], [0, 1]), ([0, 4, 8], [-1, 0])],
    ids=str,
)
def test_positions_of_packed_rows(cu_seqlens: list[int], start: list[int] | None) -> None:
    with pytest.raises(RuntimeError, match=POSITIONS):
        rotated("thd", start, cu_seqlens)


def test_packed_rows_behind_the_last_sequence_need_no_position() -> None:
    whole = rotated("thd", None, [0, 4, 8])
    assert torch.equal(rotated("thd", None, [0, 2, 2])[:2], whole[:2])
    shifted = rotated("thd", [2, 1], [0, 2, 5])
    assert torch.equal(shifted[:2], whole[2:4]) and torch.equal(shifted[2:5], whole[1:4])


def test_checked_positions_compile_to_one_graph() -> None:
    x, freqs = torch.randn(8, 2, 8), te.RotaryPositionEmbedding(8)(4)
    rotate = torch.compile(te.apply_rotary_pos_emb, fullgraph=True, backend="eager")
    cu_seqlens = torch.tensor([0, 4, 8])
    found, expected = (run(x, freqs, "thd", cu_seqlens=cu_seqlens) for run in (rotate, te.apply_rotary_pos_emb))
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match=POSITIONS):
        rotate(x, freqs, "thd", cu_seqlens=torch.tensor([0, 3, 8]))


@pytest.mark.parametrize(
    "sizes, order, message",
    [
        ([1, 3], [0, -1], "sorted_index is no order of the chunks"),
        ([1, 3], [0, 2], "sorted_index is no order of the chunks"),
        ([1, 3], [1, 1], "sorted_index is no order of the chunks"),
        ([1, 1], [1, 0], "split_sizes do not add up to the rows of inp"),
        ([5, -1], [1, 0], "split_sizes do not add up to the rows of inp"),
    ],
)
def test_chunks(sizes: list[int], order: list[int], message: str) -> None:
    x, arguments = torch.randn(4, 8), (torch.tensor(sizes), torch.tensor(order))
    for function in (
        te.moe_sort_chunks_by_index,
        lambda x, *chunks: te.moe_sort_chunks_by_index_with_probs(x, x[:, 0], *chunks),
    ):
        with pytest.raises(RuntimeError, match=message):
            function(x, *arguments)
    with pytest.raises(ValueError, match=r"have shapes \(2,\) and \(1,\); allowed: \[C\] both"):
        te.moe_sort_chunks_by_index(x, torch.tensor([1, 3]), torch.tensor([0]))


@pytest.mark.parametrize(
    "change",
    [lambda m: m + 100, lambda m: m - 100, lambda m: m + torch.tensor([[0], [9]])],
    ids=["far", "negative", "expert"],
)
def test_row_id_map(change: Callable[[Tensor], Tensor]) -> None:
    x, mask = torch.randn(4, 8), torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0]])
    rows, row_id_map = te.moe_permute(x, mask)
    probs = torch.ones(4, 2)
    assert torch.allclose(te.moe_unpermute(rows, row_id_map, probs), x * mask.sum(1, keepdim=True))
    with pytest.raises(RuntimeError, match="row_id_map names tokens or experts that are not there"):
        te.moe_unpermute(rows, change(row_id_map), probs)
    with pytest.raises(ValueError, match=r"row_id_map has shape \(2, 1\); allowed: \(2, 5\), the rows of inp"):
        te.moe_unpermute(rows, row_id_map[:, :1], probs)
