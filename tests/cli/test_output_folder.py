"""`--force`: the old folder stays until the new one is complete, and only model folders are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_models.cli.output_folder import replacing


def model(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


def test_a_new_output_is_written_directly(tmp_path: Path) -> None:
    with replacing(tmp_path / "out", force=False) as target:
        assert target == tmp_path / "out"


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    out = model(tmp_path / "out", "old")
    with pytest.raises(ValueError, match="--force"), replacing(out, force=False):
        pass
    assert (out / "config.json").read_text() == "old"


def test_force_replaces_a_model_folder(tmp_path: Path) -> None:
    out = model(tmp_path / "out", "old")
    (out / "extra").touch()
    with replacing(out, force=True) as target:
        model(target, "new")
        assert (out / "config.json").read_text() == "old"
    assert [file.name for file in out.iterdir()] == ["config.json"]
    assert (out / "config.json").read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failure_keeps_the_old_folder(tmp_path: Path) -> None:
    out = model(tmp_path / "out", "old")
    with pytest.raises(RuntimeError, match="half-way"), replacing(out, force=True) as target:
        model(target, "new")
        raise RuntimeError("half-way")
    assert (out / "config.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_dry_run_keeps_the_old_folder(tmp_path: Path) -> None:
    out = model(tmp_path / "out", "old")
    with replacing(out, force=True):
        pass
    assert (out / "config.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_force_never_deletes_anything_else(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "thesis.tex").touch()
    elif kind == "file":
        out.touch()
    else:
        out.symlink_to(model(tmp_path / "elsewhere", "old"))
    with pytest.raises(ValueError, match="not a model folder"), replacing(out, force=True):
        pass
    assert out.exists()
