"""The digest of a tensor: made of the digests of 64 rows each, however its bytes come and whichever threads hash."""

import random
import subprocess
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints.io.hashing import Digests, Lane, record_of
from te_models.checkpoints.io.header import byte_count
from te_models.checkpoints.io.tensor_hash import ROWS_PER_PART, HashThreads, TensorHash, digest_of_parts, part_bytes
from tests.checkpoints.aligned_folders import digest_by_hand, stored_bytes

SHAPES = {
    "one dimension": ("F32", (5000,), 20_000),
    "as many rows as a part": ("BF16", (64, 100), 12_800),
    "fewer rows": ("BF16", (60, 100), 12_800),
    "a row more": ("BF16", (65, 100), 12_800),
    "whole parts": ("U8", (256, 64), 4096),
    "a smaller part": ("U8", (256, 63), 16_128),
    "no rows of a part": ("U8", (0, 64), 4096),
    "experts": ("F8_E4M3", (3, 100, 80), 5120),
    "packed": ("F4", (192, 256), 8192),
    "narrow": ("F32", (5000, 1), 20_000),
    "no rows": ("F32", (0, 8), 0),
    "empty rows": ("F32", (100, 0), 0),
    "a number": ("F64", (), 8),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [False, True])
def test_bytes_in_any_portions(name: str, threads: bool) -> None:
    dtype, shape, part = SHAPES[name]
    assert part_bytes(dtype, shape, ROWS_PER_PART) == part
    chosen = random.Random(5)
    data = chosen.randbytes(byte_count(dtype, shape))
    for portion in (1, 1000, 4096, part, part + 1, 3 * part, 1 << 20):
        if not portion or len(data) > 2000 * portion:
            continue
        parts: list[bytes] = []
        with HashThreads() as running:
            found = TensorHash(dtype, shape, ROWS_PER_PART, threads=running if threads else None, then=parts.append)
            for begin in range(0, len(data), portion):
                for work in found.update(memoryview(data)[begin : begin + portion]):
                    assert threads and work.result(10) is None
            running.wait()
        assert found.digest == digest_by_hand(data, shape)
        assert len(parts) == 1 and digest_of_parts(parts[0]) == found.digest
        assert len(parts[0]) == 32 * max(1, -(-len(data) // part) if part else 1)


def test_tensors_of_earlier_releases_are_hashed_as_one() -> None:
    data = bytes(range(256)) * 64
    found = TensorHash("U8", (256, 64), 0)
    found.update(memoryview(data))
    assert found.digest == digest_by_hand(data, (len(data),)) != digest_by_hand(data, (256, 64))


def test_the_order_of_parts_counts() -> None:
    first, second = (digest_by_hand(data, (128, 64)) for data in (b"a" * 4096 + b"b" * 4096, b"b" * 4096 + b"a" * 4096))
    assert first != second


def test_both_threads_hash_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parts of several buffers, which stay with the thread on which they begin."""
    by_thread: Counter[int] = Counter()

    class Counting:
        def __init__(self, data: bytes | memoryview = b"") -> None:
            self.update(data)

        def update(self, data: bytes | memoryview) -> None:
            by_thread[threading.get_ident()] += len(data) if isinstance(data, memoryview) else 0

        def digest(self) -> bytes:
            return bytes(32)

        def hexdigest(self) -> str:
            return "0"

    for module in ("tensor_hash", "sha256"):
        monkeypatch.setattr(f"te_models.checkpoints.io.{module}.hashlib", SimpleNamespace(sha256=Counting))
    row, rows = 56 << 10, 1280
    with HashThreads() as running:
        found = TensorHash("U8", (rows, row), ROWS_PER_PART, threads=running)
        data = memoryview(bytes(1 << 20))
        for _ in range(row * rows >> 20):
            found.update(data)
        running.wait()
    assert found.digest
    least, most = sorted(count for count in by_thread.values() if count)
    assert least + most == row * rows and most - least <= 64 * row


def test_a_tensor_whose_bytes_did_not_all_come_has_no_digest() -> None:
    with Lane() as lane:
        digests = Digests(lane)
        digests.begin_tensor("a", "U8", (128, 64))
        buffer = lane.ring.next()
        digests.add(buffer, buffer.bytes[:8191])
        with pytest.raises(RuntimeError, match="not all bytes of a were hashed"):
            digests.record(8192)


def test_an_error_of_who_takes_the_parts_is_not_lost(tmp_path: Path) -> None:
    def fail(name: str, parts: bytes) -> None:
        raise KeyError(name)

    save_file({"a": torch.zeros(128, 64)}, tmp_path / "model.safetensors")
    with Lane() as lane, pytest.raises(RuntimeError, match="not all bytes of a were hashed"):
        record_of(tmp_path / "model.safetensors", lane, parts=fail)


def test_the_documented_command_prints_the_digest(tmp_path: Path) -> None:
    """docs/conversions.md shows it."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(200, 48), "x": torch.randn(7, 3)}, file)
    with Lane() as lane:
        expected = record_of(file, lane).tensors
    ((_, start, name, info),) = [found for found in stored_bytes(tmp_path) if found[2] == "w"]
    documented = Path(__file__).parents[3].joinpath("docs/conversions.md").read_text(encoding="utf-8")
    (command,) = [line for line in documented.splitlines() if line.startswith("tail -c +")]
    values = {"BEGIN": start + info.start + 1, "BYTES": info.nbytes, "PART": 64 * 48 * 4, "FILE": file}
    for word, value in values.items():
        assert f"${word}" in command
        command = command.replace(f"${word}", str(value))
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.split()[0] == expected[name]
