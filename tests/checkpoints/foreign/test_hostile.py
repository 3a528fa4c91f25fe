"""Metadata and files that somebody edited: one sentence, and nothing of them is run."""

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.foreign.dcp import METADATA, DCPStore
from te_models.checkpoints.foreign.plain_pickle import read_plain
from te_models.checkpoints.io.boxes import Range, full

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {
    "rows": torch.arange(48.0).view(6, 8),
    "half": torch.arange(10, dtype=torch.bfloat16),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "scalar": torch.tensor(3.0),
    "ids": torch.arange(5),
    "none": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    dcp.save({**TENSORS, "step": 5, "nested": {"names": ["a", {"b": 1}]}}, checkpoint_id=str(folder))
    return folder


def test_every_tensor_is_read(original: Path) -> None:
    with DCPStore(original) as store:
        assert store.tensors.keys() == TENSORS.keys()
        for name, value in TENSORS.items():
            assert torch.equal(store.read(name, full(value.shape)), value), name
        box = (Range(1, 7, 2), Range(2, 5))
        assert torch.equal(store.read("rows", box), TENSORS["rows"][1:6:2, 2:5])
        assert torch.equal(store.read("turned", (Range(1, 3), Range(0, 2))), TENSORS["turned"][1:3, 0:2])


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_is_called(original: Path, tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "called"
    for value in (Evil(marker), [Command()], {"a": Command()}, eval, print):
        folder = tmp_path / "saved"
        shutil.copytree(original, folder, dirs_exist_ok=True)
        (folder / METADATA).write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(CheckpointError, match="which no file of this kind does; nothing of it was run"):
            DCPStore(folder)
    assert not marker.exists()


def test_plain_values_are_read() -> None:
    value = {"a": [1, 2.5, None, True], "b": ("x", b"y", 1 << 70), "c": {"d": []}, "e": "\u00e4" * 300, 7: -1}
    for protocol in range(2, 6):
        assert read_plain(pickle.dumps(value, protocol), "it", ("_codecs.encode",) if protocol < 3 else ()) is not None
    assert read_plain(pickle.dumps(value, 4), "it", ()) == value
    shared = [1]
    twice = read_plain(pickle.dumps([shared, shared], 4), "it", ())
    assert twice[0] is twice[1]


def edits(original: Path, count: int) -> list[tuple[str, int, int]]:
    chance = random.Random(0)
    files = [(path.name, path.stat().st_size) for path in sorted(original.iterdir())]
    return [(name, chance.randrange(size), chance.randrange(256)) for name, size in files for _ in range(count)]


def check_edits(original: Path, tmp_path: Path, count: int) -> None:
    """Refused in a sentence, or of no effect on shapes: an edit of numbers alone no reader can tell."""
    folder = tmp_path / "saved"
    shutil.copytree(original, folder)
    for name, place, byte in edits(original, count):
        data = bytearray((original / name).read_bytes())
        data[place] = byte
        (folder / name).write_bytes(data)
        try:
            with DCPStore(folder) as store:
                for tensor, info in store.tensors.items():
                    if info.nbytes < 1 << 20:
                        assert tuple(store.read(tensor, full(info.shape)).shape) == info.shape
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 900, (name, place, byte)
        for cut in (place,) if byte % 16 == 0 else ():
            (folder / name).write_bytes(bytes(data[:cut]))
            with pytest.raises(CheckpointError):
                read_all(folder)
        (folder / name).write_bytes((original / name).read_bytes())


def read_all(folder: Path) -> None:
    with DCPStore(folder) as store:
        for tensor, info in store.tensors.items():
            store.read(tensor, full(info.shape))


def test_edits_are_told(original: Path, tmp_path: Path) -> None:
    check_edits(original, tmp_path, 150)


@pytest.mark.slow
def test_many_edits_are_told(original: Path, tmp_path: Path) -> None:
    check_edits(original, tmp_path, 6000)
