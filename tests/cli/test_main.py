"""The command line's frame: help, exit codes, one sentence for each error."""

import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import te_models
from te_models.cli import info
from te_models.cli.main import build_parser, main
from te_models.extras import MissingExtraError
from te_models.sizes import format_size, plural

VERBS = (
    "eval",
    "merge",
    "report",
    "import",
    "export",
    "relayout",
    "quantize",
    "dequantize",
    "reshard",
    "merge-shards",
    "upcycle",
    "inspect",
    "verify",
    "diff",
    "toy",
    "init",
    "tokenize",
    "rehearse",
    "train",
    "plan",
    "launch",
    "generate",
    "quickstart",
    "info",
    "certify",
    "models",
    "adopt",
    "completion",
)


def sub_parsers() -> dict[str, argparse.ArgumentParser]:
    (verbs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(verbs.choices)


def test_there_is_a_parser_for_each_verb() -> None:
    assert set(sub_parsers()) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_that_parses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text and "--debug" in text
    (example,) = re.findall(r"example:\n  te-models (.*)\n", text)
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', example)]
    args, rest = build_parser().parse_known_args(words)
    assert args.verb == verb
    assert not rest or verb == "train"


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["import", "--help"]])
def test_help_imports_no_torch(words: list[str]) -> None:
    script = f"""
import sys
from te_models.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
print([n for n in sys.modules if n.split(".")[0] in ("torch", "numpy", "rich", "shtab", "transformers", "tqdm")])
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", ["import", "export", "relayout", "reshard", "quantize", "dequantize", "upcycle"])
def test_converters_have_dry_run_and_force(verb: str) -> None:
    options = {option for action in sub_parsers()[verb]._actions for option in action.option_strings}
    assert {"--dry-run", "--force", "--max-shard-size"} <= options


def test_python_m_is_the_same_program() -> None:
    run = subprocess.run([sys.executable, "-m", "te_models", "--version"], check=True, capture_output=True, text=True)
    assert run.stdout.split()[-1] == te_models.__version__


def test_info_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"current", "block", "mxfp8"} <= set(values["recipes"])
    assert {"llama", "mixtral", "qwen3_moe"} <= set(values["families"]) and values["versions"]["torch"]
    assert values["devices"][0]["name"] == "cpu" and values["extras"]["hf"] is True


def test_info_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "recipes\n  delayed     FP8, one scale per tensor from the amaxes of earlier steps\n" in out
    assert [line for line in out.splitlines() if len(line) > 100 or "`" in line] == []


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ValueError("size is 3;\n  allowed: 4"), 2, "size is 3; allowed: 4"),
        (MissingExtraError("x needs the package 'y'"), 2, "x needs the package 'y'"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), 2, "a/b: No such file or directory"),
        (IsADirectoryError(21, "Is a directory", "a/b"), 2, "a/b: Is a directory"),
        (OSError(28, "No space left on device", "a/b"), 3, "a/b: No space left on device"),
        (OSError(5, "Input/output error"), 3, "Input/output error"),
        (MemoryError(), 3, "MemoryError"),
        (TypeError("a bug"), 3, "TypeError: a bug (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_one_sentence(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(info, "collect", fail)
    assert main(["info"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"te-models: {sentence}\n"


@pytest.mark.parametrize(("error", "code"), [(ValueError("deep inside"), 2), (TypeError("deep inside"), 3)])
def test_debug_shows_the_traceback_beside_the_sentence(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same exit code: 1, that of an uncaught exception, means that the answer is no."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(info, "collect", fail)
    assert main(["info", "--debug"]) == code
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "in fail\n" in printed
    assert printed.splitlines()[-1].startswith("te-models: ") and "deep inside" in printed.splitlines()[-1]


def run_into(output: Any, *words: str) -> tuple[int, bytes]:
    """Run the command line with another standard output, written when it is full or at the end, as usual; return the
    exit code and what it says."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "te_models", *words]
    run = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=environment)
    return run.returncode, run.stderr


@pytest.mark.parametrize("words", [["--help"], ["verify", "--help"]])
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    assert run_into(write, *words) == (0, b"")
    os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        assert run_into(full, "--help") == (3, b"te-models: standard output: No space left on device\n")


def test_the_answer_reaches_whoever_reads_only_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code stays that of the answer where the text cannot be printed any more."""

    class Left(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        def fileno(self) -> int:
            return scratch

    scratch = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(info, "run", lambda args: 1)
    monkeypatch.setattr(sys, "stdout", Left())
    assert main(["info"]) == 1
    os.close(scratch)


@pytest.mark.parametrize(
    ("encoding", "name", "written"), [("ascii", "mödel", rb"m\xf6del"), ("utf-8", "ö\udcff", b"\xc3\xb6\\udcff")]
)
def test_names_that_the_terminal_cannot_show_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, name: str, written: bytes
) -> None:
    """The work is done by then, so its result is told."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(info, "run", lambda args: print(name) or 0)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["info"]) == 0 and stdout.buffer.getvalue() == written + b"\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "te-models needs VERB; see: te-models --help"),
        (["--versoin"], "te-models has no option '--versoin'; did you mean '--version'?; see: te-models --help"),
        (["conjure"], "'conjure' is not a verb; allowed: import, "),
        (["quantise", "a"], "generate, eval, completion; did you mean 'quantize'?; see: te-models --help"),
        (["info", "--jsn"], "info has no option '--jsn'; did you mean '--json'?; see: te-models info --help"),
        (["info", "more"], "info does not take 'more'; see: "),
        (["relayout", "a", "b"], "relayout needs --layout; see: te-models relayout --help"),
        (["import"], "import needs HF_DIR, OUT; see: "),
        (["relayout", "a", "b", "--layout", "columns"], "--layout is 'columns'; allowed: grouped, per-gemm; see: "),
        (["relayout", "a", "b", "--layout", "groupd"], "; did you mean 'grouped'?; see: "),
        (["relayout", "a", "b", "--layout"], "--layout needs a value; see: "),
        (["upcycle", "a", "b", "--experts", "four", "--topk", "2"], "--experts is 'four'; allowed: an integer; see: "),
        (
            ["generate", "a", "--prompt", "x", "--temperature", "hot"],
            "--temperature is 'hot'; allowed: a number; see: ",
        ),
        (["generate", "a"], "one of --prompt --prompt-file --prompts --chat is needed; see: "),
        (["generate", "a", "--prompt", "x", "--prompt-file", "y"], "--prompt-file cannot be used with --prompt"),
        (["info", "--json=x"], "--json takes no value, and has 'x'; see: "),
        (["train"], "train needs CONFIG.toml; see: te-models train --help"),
        (
            ["train", "--data.text", "a", "run.toml"],
            "CONFIG.toml comes before keys that are lists: te-models train run",
        ),
        (["train", "run.toml", "--lr", "1"], "train has no option '--lr'; did you mean '--optimizer.lr'?; see: "),
        (
            ["train", "run.toml", "--compile", "false"],
            "train does not take 'false'; a key that is true or false is set",
        ),
        (["completion", "powershell"], "shell is 'powershell'; allowed: bash, zsh, fish; see: "),
    ],
)
def test_usage_errors_are_one_sentence_and_exit_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("te-models: ") and says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["import", "missing", "out"],
        ["export", "missing", "out"],
        ["relayout", "missing", "out", "--layout", "grouped"],
        ["quantize", "missing", "out", "--recipe", "mxfp8"],
        ["upcycle", "missing", "out", "--experts", "4", "--topk", "2"],
        ["inspect", "missing"],
        ["verify", "missing"],
        ["verify", "missing", "missing"],
        ["train", "missing.toml"],
        ["generate", "missing", "--prompt", "x"],
        ["generate", "missing", "--prompt-file", "missing.txt"],
        ["quickstart", "--epochs", "0"],
        ["train", "--help-keys", "dta"],
        ["info", "--keys", "attn"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence_and_exit_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("te-models: ")
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def said(*words: str, capsys: pytest.CaptureFixture) -> str:
    """What the command says of words that it refuses with exit code 2, from parsing or from a verb."""
    try:
        code = main(list(words))
    except SystemExit as end:
        code = end.code
    assert code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generate", "x", "--promt", "a"], "generate has no option '--promt'; did you mean '--prompt'?"),
        (["plan", "x.toml", "--ranks", "0"], "--ranks is 0; allowed: 1 or more"),
        (["plan", "x.toml", "--ranks", "8", "--node-ranks", "0"], "--node-ranks is 0; allowed: 1 or more"),
        (["plan", "x.toml", "--ranks", "8", "--tflops", "nan"], "--tflops is nan; allowed: a finite number above 0"),
        (
            ["plan", "x.toml", "--ranks", "8", "--memory-gib", "0"],
            "--memory-gib is 0; allowed: a finite number above 0",
        ),
        (["upcycle", "a", "b", "--experts", "0", "--topk", "1"], "--experts is 0; allowed: 1 or more"),
        (["tokenize", "x", "--workers", "0"], "--workers is 0; allowed: 1 or more"),
        (["reshard", "a", "b", "--max-shard-size", "5"], "a size with its unit, such as 500MB or 2GiB"),
        (["generate", "no-such-folder", "--prompt", "a"], "no-such-folder"),
    ],
)
def test_values_and_words_that_nothing_can_use(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(*words, capsys=capsys)
    assert sentence in found and "\n" not in found and "AssertionError" not in found


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        (False, "there is no PyTorch; te_models needs PyTorch 2.11 or later"),
        (True, "te_models needs PyTorch 2.11 or later, and 2.9.1 is installed"),
    ],
    ids=["none", "old"],
)
def test_a_torch_that_cannot_be_used_is_one_sentence(old: bool, sentence: str, tmp_path: Path) -> None:
    """A verb that computes, in a process without torch, or whose torch says that it is old."""
    script = """
import sys
import te_models.cli.main as cli
if OLD:
    import torch
    torch.__version__ = type(torch.__version__)("2.9.1")
else:
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")
    sys.meta_path.insert(0, Absent())
sys.exit(cli.main(["generate", sys.argv[1], "--prompt", "a", "--tokenizer", "bytes"]))
"""
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", f"OLD = {old}\n{script}", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and sentence in run.stderr and "\n" not in run.stderr.strip(), run.stderr


def test_one_thing_is_singular() -> None:
    assert [plural(1, what) for what in ("step", "copy", "box")] == ["1 step", "1 copy", "1 box"]
    assert [plural(1204, what) for what in ("step", "copy", "box", "key")] == [
        "1,204 steps",
        "1,204 copies",
        "1,204 boxes",
        "1,204 keys",
    ]
    assert (format_size(1), format_size(512)) == ("1 byte", "512 bytes")


def test_recipes_and_dtypes_are_words_of_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Recipes are refused before torch is imported, and are those that there are; short names of dtypes are taken."""
    from te_models.checkpoints.tools.options import RECIPES
    from te_models.cli.parser import dtype
    from te_models.layers import RECIPES as KNOWN

    assert set(RECIPES) == {name for name, found in KNOWN.items() if not found.by_name}
    assert "--recipe is 'mxpf8'; allowed: delayed, " in said("quantize", "a", "b", "--recipe", "mxpf8", capsys=capsys)
    assert [dtype(text) for text in ("bf16", "fp32", "float16", "x")] == ["bfloat16", "float32", "float16", "x"]
    assert "missing" in said("export", "missing", "out", "--dtype", "bf16", capsys=capsys)
