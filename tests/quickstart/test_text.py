"""The standard library as text, and windows of it."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from te_models.quickstart.text import library_files, middle_windows


def test_files_are_split_without_overlap() -> None:
    training, held_out = library_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len(held_out) >= 8 and 15 * len(held_out) < len(training) < 20 * len(held_out) + 20
    assert not set(training) & set(held_out)
    assert all(file.is_relative_to(root) and "site-packages" not in file.parts for file in training + held_out)
    assert library_files() == (training, held_out)


def test_windows_are_the_middles_of_long_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, text in zip(files, ("abcdefgh", "xy", "ghijklmn"), strict=True):
        file.write_text(text)

    def tokenizer(text: str, **options: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    windows = middle_windows(tokenizer, files, 2, 3)
    assert torch.equal(windows, torch.tensor([[ord(c) for c in "efg"], [ord(c) for c in "klm"]]))
    with pytest.raises(ValueError, match="only 2 of 3"):
        middle_windows(tokenizer, files, 3, 3)
