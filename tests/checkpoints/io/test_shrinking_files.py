"""A weight file that becomes shorter while it is read: an error in one sentence, where a memory map would end the
process (SIGBUS)."""

import json
import os
import sys
from pathlib import Path

import torch

from te_models.checkpoints import CheckpointError, expected_tensors, import_hf, open_checkpoint
from te_models.checkpoints.io.boxes import Range
from tests.fork_server import run_python

NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def load(checkpoint) -> None:
    checkpoint.load_into({name: torch.empty(shape) for name, shape in expected_tensors(checkpoint.config).items()})


def strided(checkpoint) -> None:
    rows, columns = checkpoint.tensors[NAME].shape
    checkpoint.store.read(NAME, (Range(0, rows), Range(3, columns)))


def main(folder: Path) -> None:
    """Read a folder whose weights become shorter once it is open, and say what happens."""
    reports = {}
    for name, read in {
        "load": load,
        "whole": lambda checkpoint: checkpoint.files.view(NAME),
        "strided": strided,
        "scales": lambda checkpoint: checkpoint.check_scales(),
    }.items():
        file = folder / "model.safetensors"
        good = file.read_bytes()
        with open_checkpoint(folder, verify=False) as checkpoint:
            checkpoint.files.read_into(NAME, 0, memoryview(bytearray(1)))  # the file is open, and stays the same file
            os.truncate(file, 16)
            try:
                read(checkpoint)
                reports[name] = "nothing"
            except CheckpointError as error:
                reports[name] = str(error)
        file.write_bytes(good)
    print(json.dumps(reports))


def test_a_file_that_shrinks_is_named(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "ours")
    result = run_python(["-m", "tests.checkpoints.io.test_shrinking_files", str(tmp_path / "ours")])
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    assert reports.pop("scales") == "nothing", "there are none to read"
    for name, message in reports.items():
        assert message == "model.safetensors became shorter while it was read", name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
