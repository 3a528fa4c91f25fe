"""Completion with the Tab key: the scripts run in their shells, where these are installed."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from te_models.cli.main import main

CASES = {
    "te-models qu": ["quantize", "quickstart"],
    "te-models quantize --re": ["--recipe"],
    "te-models relayout a b --layout ": ["grouped", "per-gemm"],
    "te-models train run.toml --data.seq": ["--data.sequence-length"],
    "te-models train run.toml --precision.recipe mx": ["mxfp8"],
    "te-models train run.toml --no-c": ["--no-compile"],
    "te-models train run.toml --no-compile --model.config.moe.num": ["--model.config.moe.num-moe-experts"],
    "te-models inspect mod": ["model"],
    "te-models train ru": ["run.toml"],
}
"""A line, and what completes its last word."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "run.toml").touch()
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("shtab", reason="writes it (extra completion)")
    assert main(["completion", shell, "--json"]) == 0
    script = json.loads(capsys.readouterr().out)["script"]
    assert main(["completion", shell]) == 0 and capsys.readouterr().out == script.rstrip("\n") + "\n"
    for word in ("quickstart", "precision.recipe", "mxfp8"):
        assert word in script
    if shutil.which(shell):
        (folder / "script").write_text(script)
        subprocess.run([shell, "-n", str(folder / "script")], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("shtab", reason="writes it (extra completion)")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (function,) = re.findall(r"^complete .*-F (\w+) te-models$", script, re.MULTILINE)
    tries = [f"source {folder}/script"]
    (folder / "script").write_text(script)
    for line in CASES:
        words = line.split(" ")
        tries.append(f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE={shlex.quote(line)}")
        tries.append(f"COMP_POINT={len(line)}; COMPREPLY=(); {function} te-models {shlex.quote(words[-1])} x")
        tries.append('echo "${COMPREPLY[*]}"')
    run = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(tries)], cwd=folder, capture_output=True, text=True, check=True
    )
    assert dict(zip(CASES, map(str.split, run.stdout.splitlines()), strict=True)) == CASES


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("shtab", reason="writes it (extra completion)")
    assert main(["completion", "fish"]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    tries = ["source script"]
    tries += [f"echo (complete -C {shlex.quote(line)} | string split -f 1 \\t | string trim -r -c /)" for line in CASES]
    command = ["fish", "--no-config", "-c", "\n".join(tries)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert dict(zip(CASES, map(str.split, run.stdout.splitlines()), strict=True)) == CASES


ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'fpath=($PWD/functions $fpath); autoload -Uz compinit; compinit -u -D; bindkey "^I" complete-word'
zpty -w shell 'PROMPT=""; print -r -- re""ady'
until [[ $out == *ready* ]]; do zpty -r shell out; done
zpty -n -w shell "$1"$'\\t'
while zpty -r shell part '*'"$2"'*'; do [[ $part == *$2* ]] && exit 0; done
exit 1
"""
"""Types a line and the Tab key into an interactive zsh, and waits for what completes it."""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("line", [line for line, found in CASES.items() if len(found) == 1])
def test_zsh_completes(line: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("shtab", reason="writes it (extra completion)")
    assert main(["completion", "zsh"]) == 0
    (folder / "functions").mkdir()
    (folder / "functions" / "_te-models").write_text(capsys.readouterr().out)
    completed = f"{line.rpartition(' ')[0]} {CASES[line][0]}"
    subprocess.run(["zsh", "-f", "-c", ZSH, "zsh", line, completed], cwd=folder, check=True, timeout=60)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    sentence = "te-models: the completion script needs the package 'shtab': pip install 'te_models[completion]'\n"
    assert capsys.readouterr().err == sentence
