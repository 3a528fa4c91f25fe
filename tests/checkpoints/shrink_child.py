"""Run by test_shrinking_files.py: read a folder whose weights become shorter once it is open, and say what happens."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from te_models.checkpoints import CheckpointError, expected_tensors, open_checkpoint
from te_models.checkpoints.io.boxes import Range

folder = Path(sys.argv[1])
NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def load(checkpoint) -> None:
    checkpoint.load_into({name: torch.empty(shape) for name, shape in expected_tensors(checkpoint.config).items()})


def strided(checkpoint) -> None:
    rows, columns = checkpoint.tensors[NAME].shape
    checkpoint.store.read(NAME, (Range(0, rows), Range(3, columns)))


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
