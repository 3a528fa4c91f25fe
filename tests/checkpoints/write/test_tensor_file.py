"""One safetensors file at a time: written like every other file of ours, read without a memory map."""

import ast
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io import store
from te_models.checkpoints.io.store import read_tensors
from te_models.checkpoints.write import writer
from te_models.checkpoints.write.writer import write_tensors
from tests.checkpoints.hf_cases import assert_same_bits

ROOT = Path(__file__).resolve().parents[3]
TENSORS = {
    "a odd number of bytes": torch.arange(3, dtype=torch.uint8),
    "a scalar": torch.tensor(2.5, dtype=torch.float64),
    "no element": torch.empty(0, 4),
    "not contiguous": torch.arange(12.0).view(3, 4).t(),
    "numbers": torch.tensor([float("nan"), -0.0, float("inf")]),
    "scales": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
    "wide": torch.arange(1 << 19, dtype=torch.int64),
}


def test_every_bit_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"step": "3"})
    expected = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    tensors, metadata = read_tensors(path)
    assert metadata == {"step": "3"} and tensors.keys() == TENSORS.keys()
    assert_same_bits(tensors, expected)
    assert_same_bits(load_file(path), expected)
    write_tensors(path, {})
    assert read_tensors(path) == ({}, {}) and [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_mode_is_that_of_new_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "t.safetensors", TENSORS)
    finally:
        os.umask(before)
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS)
    before = path.read_bytes()

    def fail(folder: Path, shards: list, _: object) -> None:
        (folder / shards[0].file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_weights", fail)
    with pytest.raises(OSError, match=r"^t\.safetensors: No space left on device$"):
        write_tensors(path, {"a": torch.zeros(1)})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_shrinks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS)
    read_header = store.read_header

    def then_cut(path: Path, file: str):
        header = read_header(path, file)
        os.truncate(path, header.data_start)
        return header

    monkeypatch.setattr(store, "read_header", then_cut)
    with pytest.raises(CheckpointError, match=r"^t\.safetensors became shorter while it was read$"):
        read_tensors(path)


def test_no_other_writer_or_reader_of_safetensors() -> None:
    """safetensors' own writer leaves files that nobody else can read, and its reader maps them into memory. A layer's
    extra state is bytes in memory, and no file."""
    found = []
    for folder in ("checkpoints", "layers", "kernels", "te_models"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(source)) if "safetensors" in source else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "safetensors":
                    found += [f"{file.relative_to(ROOT)}: {name.name}" for name in node.names]
    extra_state = "layers/module/extra_state.py: "
    assert sorted(found) == [extra_state + name for name in ("SafetensorError", "load", "save")]
