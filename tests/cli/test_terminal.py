"""Tables, colour and progress on a terminal; plain text in files, in pipes, and without rich."""

import contextlib
import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_models.cli.main import main
from te_models.terminal import TextTable, show
from tests.training.runs import TEXT, tiny_model


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let te_models find everything but rich."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name, *rest))


def on_a_terminal(command: list[str], **environment: str) -> tuple[int, str]:
    """Run a command whose three streams are a terminal; return its exit code and everything it prints."""
    control, terminal = pty.openpty()
    values: dict[str, Any] = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **environment}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=values)
    os.close(terminal)
    printed = b""
    with contextlib.suppress(OSError):  # what a terminal answers when its process has ended
        while part := os.read(control, 4096):
            printed += part
    os.close(control)
    return process.wait(), printed.decode()


COMMAND = [sys.executable, "-m", "te_models"]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m|\x1b\[38;")
ROWS = [("parameter", "relative"), ("a.weight", "0.5"), ("b", "[red]0.25")]


def test_an_error_is_red_on_a_terminal_and_plain_in_a_pipe() -> None:
    pytest.importorskip("rich", reason="colours it (extra train)")
    words = [*COMMAND, "train", "missing.toml"]
    sentence = "te-models: cannot read the training configuration missing.toml: No such file or directory"
    code, printed = on_a_terminal(words)
    assert code == 2 and "\x1b[1;31mte-models:\x1b[0m cannot read" in printed
    code, printed = on_a_terminal(words, NO_COLOR="1")
    assert code == 2 and not COLOUR.search(printed)
    assert on_a_terminal(words, TERM="dumb") == (2, f"{sentence}\r\n")
    piped = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (piped.returncode, piped.stdout, piped.stderr) == (2, "", f"{sentence}\n")


def test_a_table_is_drawn_by_rich_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="draws it (extra train)")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    table, plain = (
        TextTable(ROWS, "parameters", heading=True),
        "  parameter  relative\n  a.weight   0.5\n  b          [red]0.25",
    )
    for stream, expected in ((Terminal, None), (io.StringIO, f"parameters\n{plain}\n")):
        monkeypatch.setattr(sys, "stdout", out := stream())
        show(table)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
        assert (printed == out.getvalue()) is (expected is not None)
        assert [line.split() for line in printed.splitlines()] == [["parameters"], *map(list, ROWS)]
        assert expected is None or printed == expected
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    show(TextTable([("decoder.layers.0.self_attention.weight", "0.5")]))
    assert "".join(re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).split()).replace("0.5", "", 1) == (
        "decoder.layers.0.self_attention.weight"
    )
    without_rich(monkeypatch)
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    show(table)
    assert out.getvalue() == f"parameters\n{plain}\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model.json").write_text(tiny_model().to_json())
    file = folder / "run.toml"
    file.write_text(f"""
output_dir = "{folder}/run"
steps = 2
device = "cpu"
compile = false
model = {{ config_file = "{folder}/model.json" }}
data = {{ path = "{folder}/data", text = ["{TEXT}"], tokenizer = "bytes", sequence_length = 32 }}
evaluation = {{ batches = 1 }}
""")
    return file


STEP = r"step {}/2  loss \d\.\d{{4}}{}  [\d,]+ tokens/s  grad norm \S+  lr \d\.\d\de-\d\d  [\d,.]+ [MG]iB"
STEP += r"  \S+ TFLOP/s(  data wait \d+\.\d\d s)?"


def test_a_run_in_a_pipe_prints_a_line_for_each_step(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 2
    tokenizing, making, first, last, validation = captured.err.splitlines()
    assert tokenizing == f"te-models: tokenizing data.text into {config.parent}/data"
    assert making == "te-models: making a model of random weights"
    assert re.fullmatch(STEP.format(1, ""), first) and re.fullmatch(STEP.format(2, "  eta 0:00"), last)
    assert re.fullmatch(r"step 2/2  validation loss \d\.\d{4}", validation)


def test_a_run_that_shows_no_progress_is_silent(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--log.no-progress", "--output-dir", f"{config.parent}/silent"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith("2 steps, loss ")


def test_a_run_on_a_terminal_shows_a_bar(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="draws it (extra train)")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["train", str(config), "--output-dir", f"{config.parent}/bar"]) == 0
    printed = re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.getvalue())
    assert "te-models: making a model of random weights\n" in printed
    assert re.search(r"2/2 +loss \d\.\d{4} +eta 0:00 .*tokens/s", printed)
    assert re.search(r"step 2/2  validation loss \d\.\d{4}\n", printed) and "step 1/2" not in printed


def test_a_terminal_hears_why_nothing_happens(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    (config.parent / "config.json").write_text("{}")  # of no model
    words = ["generate", str(config.parent), "--prompt", "x"]
    assert main(words) == 2 and "loading" not in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(words) == 2 and terminal.getvalue().startswith(f"te-models: loading {config.parent}\n")
