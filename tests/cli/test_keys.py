"""`train --help-keys` and `info --keys`: every key with its type, default and sentence, without importing torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from te_models.cli.main import main

RUN = 'output_dir = "runs/a"\nsteps = 7\nmodel.path = "m"\ndata.path = "d"\noptimizer.betas = [0.8, 0.9]\n'


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_keys_are_listed_without_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    script = """
import sys
from te_models.cli.main import main
main(["train", "--help-keys"])
main(["info", "--keys"])
main(["train", "run.toml", "--dry-run", "--steps", "9"])
print("torch" in sys.modules or "numpy" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert run.stdout.endswith("\nFalse\n") and run.stderr == ""
    for line in ("[data]  The token data set and the shape of a batch.", "[moe.router]  How tokens choose experts."):
        assert f"\n{line}\n" in run.stdout
    assert '"steps": 9' in run.stdout


def test_a_key_is_a_line_of_toml_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "102")
    text = printed(capsys, "train", "--help-keys", "data")
    assert text.startswith(
        "[data]  The token data set and the shape of a batch.\n  path  (string, unset)\n      Folder"
    )
    assert "\n  sequence_length = 1024  (integer)\n      Tokens in a window.\n" in text
    assert "\n  tokenizer  (string, unset)\n" in text and "[optimizer]" not in text
    assert "[model.config.moe.router]" in printed(capsys, "train", "--help-keys", "model.config")
    assert printed(capsys, "info", "--keys", "moe").startswith("[moe]  Mixture of experts;")
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, printed(capsys, "train", "--help-keys").splitlines())) <= 58


@pytest.mark.parametrize("words", [["train", "run.toml", "--help-keys"], ["train", "--help-keys", "run.toml"]])
def test_a_file_shows_what_it_sets(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "102")
    Path("run.toml").write_text(RUN)
    text = printed(capsys, *words, "--optimizer.lr", "1e-3")
    assert "\n  steps  (integer, required; here 7)\n" in text
    assert "\n  betas = [0.9, 0.95]  (list of numbers; here [0.8, 0.9])\n" in text
    assert "\n  lr = 0.0003  (number; here 0.001)\n" in text and "\n  eps = 1e-08  (number)\n" in text


def test_keys_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    keys = json.loads(printed(capsys, "train", "--help-keys", "schedule", "--json"))["keys"]
    assert keys[0]["key"] == "kind" and keys[0]["table"] == "schedule" and keys[0]["default"] == "cosine"
    assert {"type", "required", "sentence"} < keys[0].keys()


def test_a_table_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-keys", "dta"]) == 2
    assert capsys.readouterr().err.endswith("log, profile, hub; did you mean 'data'?\n")
