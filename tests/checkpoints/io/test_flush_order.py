"""What a power cut may not undo: everything of a result is flushed before it gets its name, and the name after.

The session's os.fsync does nothing (tests/conftest.py), so that only its calls can be looked at: which path each was
of, in one order with the renames."""

import os
from pathlib import Path

import pytest
import torch

from te_models.checkpoints.io import atomic
from te_models.checkpoints.io.atomic import new_folder, replace_text, replaced_file
from te_models.checkpoints.write.writer import write_tensors
from te_models.training import build_dataset

Events = list[tuple[str, Path]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Flushes, by the path that a descriptor had at that time, and the new names that files and folders got."""
    found: Events = []
    rename, exchange, remove = Path.rename, atomic._exchange, atomic.remove_locked

    def fsync(fd: int) -> None:
        found.append(("flush", Path(f"/proc/self/fd/{fd}").readlink()))

    def renamed(self: Path, target: Path) -> Path:
        result = rename(self, target)
        found.append(("rename", Path(target)))
        return result

    def exchanged(a: Path, b: Path) -> bool:
        done = exchange(a, b)
        if done:
            found.append(("rename", b))
        return done

    def removed(folder: Path) -> None:
        found.append(("remove", folder))
        remove(folder)

    monkeypatch.setattr(atomic, "remove_locked", removed)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(atomic, "_exchange", exchanged)
    return found


def assert_durable(events: Events, result: Path, names: set[str]) -> None:
    """That the last rename was to `result`; before it everything in what became it was flushed, the folders after their
    entries; after it the folder around."""
    at = max(i for i, (kind, path) in enumerate(events) if (kind, path) == ("rename", result))
    before = [path for kind, path in events[:at] if kind == "flush"]
    flushed = {name: [i for i, path in enumerate(before) if path.match(f"*/{name}")] for name in names}
    assert all(flushed.values()), f"not flushed before the rename: {[n for n, found in flushed.items() if not found]}"
    for name in names:
        for inner in names:
            if Path(name) in Path(inner).parents:
                assert max(flushed[name]) > max(flushed[inner]), f"{name} was flushed before {inner} was in it"
    after = events[at:]
    assert ("flush", result.parent) in after, "the new name may be lost"
    removals = [i for i, (kind, _) in enumerate(after) if kind == "remove"]
    assert not removals or ("flush", result.parent) in after[: removals[0]], (
        "the old folder goes before the new name is kept"
    )


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("can_exchange", [False, True])
def test_a_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, events: Events, existing: bool, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    if existing:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/old").write_text("x")
    with new_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "inner/most").mkdir(parents=True)
        for name in ("file", "inner/file", "inner/most/file"):
            (folder / name).write_text(name)
    content = ("content", "content/file", "content/inner", "content/inner/file")
    assert_durable(events, tmp_path / "out", {*content, "content/inner/most", "content/inner/most/file"})


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, events: Events) -> None:
    replace_text(tmp_path / "text", "x")
    with replaced_file(tmp_path / "picture") as path:
        path.write_bytes(b"x")
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    for name in ("text", "picture", "a.safetensors"):
        at = events.index(("rename", tmp_path / name))
        kinds = [(kind, path.name.startswith(f".{name}.")) for kind, path in events[:at]]
        assert ("flush", True) in kinds, f"{name} was not flushed"
        assert ("flush", tmp_path) in events[at : at + 2], f"the name {name} was not flushed"


def test_a_part_of_a_data_set_is_on_the_disk_before_it_counts_as_complete(tmp_path: Path, events: Events) -> None:
    (tmp_path / "text.txt").write_text("some words")
    build_dataset(tmp_path / "data", [tmp_path / "text.txt"], "bytes")
    part = tmp_path / ".data.parts/0"
    at = events.index(("rename", part))
    before = [path for kind, path in events[:at] if kind == "flush"]
    partial = part.with_name("0.partial")
    assert {partial, partial / "tokens.bin", partial / "documents.bin"} <= {*before} and before[-1] == partial
