"""Regions of tensors read from files: the same elements as indexing the whole tensor, in few calls."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints.io.box_reads import cut_rows, read_box
from te_models.checkpoints.io.boxes import Range, slices
from te_models.checkpoints.io.store import FileStore

SHAPES = [(), (7,), (5, 3), (4, 6, 5), (2, 3, 4, 5), (3, 1, 8), (300, 700), (0, 4), (2, 400, 300)]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_is_what_indexing_gives(tmp_path: Path, shape: tuple[int, ...]) -> None:
    chosen = random.Random(3)
    tensor = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    save_file({"a": torch.ones(3, dtype=torch.uint8), "x": tensor}, tmp_path / "x.safetensors")
    with FileStore({"x.safetensors": tmp_path / "x.safetensors"}) as store:
        assert torch.equal(store.view("x"), tensor)
        for _ in range(60):
            box = []
            for n in shape:
                step = chosen.choice([1, 1, 1, 2, 3])
                size = chosen.randint(0, n) if chosen.random() < 0.7 else n
                size = min(size, -(-n // step))
                start = chosen.randint(0, n - ((size - 1) * step + 1)) if size else 0
                box.append(Range(start, start + size * step, step))
            assert torch.equal(store.read("x", tuple(box)), tensor[slices(tuple(box))]), box


def test_rows_that_lie_apart_are_read_one_by_one() -> None:
    """A few columns of a wide matrix: a call per row and no more bytes; columns in a narrow one: one call."""
    calls: list[int] = []

    def read(begin: int, buffer: memoryview) -> None:
        calls.append(len(buffer))

    read_box(read, (64, 1 << 16), torch.int16, (Range(0, 64), Range(100, 2148)))
    assert calls == [2 * 2048] * 64
    calls.clear()
    read_box(read, (64, 256), torch.int16, (Range(0, 64), Range(100, 101)))
    assert calls == [2 * (63 * 256 + 1)]
    calls.clear()
    read_box(read, (64, 1 << 16), torch.int16, (Range(1, 65, 2), Range(0, 1 << 16)))
    assert calls == [2 * (1 << 16)] * 32 or sum(calls) <= 2 * 64 * (1 << 16)


def test_rows_are_cut_where_that_is_asked_for() -> None:
    assert [box[0] for box in cut_rows((10, 4), 12)] == [Range(0, 3), Range(3, 6), Range(6, 9), Range(9, 10)]
    assert cut_rows((), 5) == [()]
    assert cut_rows((2, 100), 1) == [(Range(0, 1), Range(0, 100)), (Range(1, 2), Range(0, 100))]
