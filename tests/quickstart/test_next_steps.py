"""The last lines of the quickstart: where its models are, and commands that are those of README.md."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from te_models.cli.main import build_parser
from te_models.quickstart import main as quickstart
from te_models.quickstart.main import NEXT, _where
from tests.structure.tree import ROOT


def test_the_commands_are_those_of_the_readme() -> None:
    """tests/structure runs these there."""
    assert f"```sh\n{NEXT.format(out='quickstart-out')}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_commands_name_the_folder_as_a_shell_reads_it() -> None:
    lines = _where(Path("my runs/out"), None).splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("  te-models ")]
    assert len(commands) == 5
    for program, *words in commands:
        assert program == "te-models"
        args = vars(build_parser().parse_args(words))
        folders = [args.get(name) for name in ("folder", "source", "model", "a")]
        assert any(str(folder).startswith("my runs/out/model") for folder in folders)


@pytest.mark.parametrize("found", ["/usr/bin/te-models", None])
def test_the_folders_and_the_environment_are_named(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: found)
    monkeypatch.setattr(sys, "prefix", "/work/.venv")
    text = _where(Path("out"), Path("/cache/SmolLM2"))
    assert "models: out/model, out/moe, out/hf-moe\n" in text
    assert "imported from: /cache/SmolLM2 (kept there for the next time)\n" in text
    assert ("source /work/.venv/bin/activate" in text) is (found is None)
    assert not re.search("imported", _where(Path("out"), None))


@pytest.mark.parametrize("tiny", [False, True])
def test_a_run_ends_with_them(
    tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps themselves are tested in test_quickstart.py. The tiny model's folder does not stay."""
    for name in ("import_model", "quantize_and_compare", "experts", "train_experts", "export_and_compare"):
        monkeypatch.setattr(quickstart.steps, name, lambda *args: None)
    monkeypatch.setattr(quickstart, "_prepare", lambda *args: SimpleNamespace(hf=Path("/cache/SmolLM2")))
    out = tmp_path / "out"
    quickstart.run_quickstart(out, offline_tiny=tiny)
    printed = capsys.readouterr().out
    assert printed.endswith(f"  te-models verify {out}/model {out}/hf-model\n")
    assert ("/cache/SmolLM2" in printed) is not tiny
