"""Each group's rows begin at a multiple of `align`, copied one by one, by an index, or without reading the splits."""

import pytest
import torch

from te_models.kernels.quantize.fp8 import grouped
from te_models.kernels.quantize.fp8.grouped import pad_rows, padded_length


@pytest.mark.parametrize("splits", [[5], [0, 4, 3], [1, 0, 0, 8, 2, 0], [0, 0], [3] * 9], ids=str)
@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("way", ["by group", "by index", "unread"])
def test_groups_begin_at_a_multiple(way: str, behind: int, splits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(1.0, 3 * (sum(splits) + behind) + 1).view(-1, 3)
    monkeypatch.setattr(grouped, "_FEW", 100 if way == "by group" else 0)
    monkeypatch.setattr(grouped, "eager_on_cpu", lambda t: way != "unread")
    expected = torch.zeros(padded_length(len(x), len(splits), 4), 3)
    begin = place = 0
    for rows in splits if len(x) else []:
        expected[place : place + rows] = x[begin : begin + rows]
        begin, place = begin + rows, place + -(-rows // 4) * 4
    assert torch.equal(pad_rows(x, torch.tensor(splits), 4), expected)
