"""The scripts and configurations in docs/examples/runs run, each with a small model in place of the real one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from te_models.cli.main import main
from te_models.training import load_config, read_metrics
from tests.fork_server import run_python
from tests.structure.test_documented_code import WITHOUT_COMPILER, reader  # noqa: F401  a folder with small models

RUNS = Path(__file__).parents[2] / "docs/examples/runs"
CHAT = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""
SMALL = ["--steps", "2", "--length", "32"]
MODEL = "models/smollm2"
SCRIPTS = {
    "pretrain_dense.py": (["corpus/*.py", "--hidden", "64", "--no-compile", *SMALL], "runs/dense/final"),
    "pretrain_moe.py": (["corpus/*.py", "--hidden", "64", "--no-compile", *SMALL], "runs/moe"),
    "upcycle.py": ([MODEL, "corpus/*.py", "--no-compile", *SMALL], "runs/upcycled/final"),
    "lora_fp8.py": ([MODEL, "corpus/a.py", *SMALL], "runs/lora-merged"),
    "trainer.py": ([MODEL, "corpus/a.py", *SMALL], "runs/trainer/final"),
}
"""Script: its arguments, and the model folder that it leaves."""
TINY = ["--steps", "2", "--no-compile", "--data.sequence-length", "32", "--data.micro-batch-size", "1"]
TINY += ["--schedule.warmup-steps", "1", "--data.validation-fraction", "0.2", "--evaluation.batches", "1"]
SHRUNK = ["--model.config.hidden-size", "32", "--model.config.num-layers", "1", "--steps", "2", "--no-compile"]
SHRUNK += ["--data.sequence-length", "32", "--device", "cpu"]


def test_every_file_is_run_here() -> None:
    assert {path.name for path in RUNS.iterdir()} == {*SCRIPTS, "finetune.toml", "sft.toml", "parallel.toml"}


def test_pretraining_scripts_are_short() -> None:
    for name in ("pretrain_dense.py", "pretrain_moe.py"):
        code = (RUNS / name).read_text().partition('"""\n\n')[2]
        assert len(code.splitlines()) <= 60, name


@pytest.mark.sentinels("pretrain_dense.py", "pretrain_moe.py", "upcycle.py")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, reader: Path, tmp_path: Path) -> None:  # noqa: F811
    if name == "lora_fp8.py":
        pytest.importorskip("peft")
    if name == "trainer.py":
        pytest.importorskip("accelerate")
    for folder in ("models", "corpus"):
        (tmp_path / folder).symlink_to(reader / folder)
    arguments, result = SCRIPTS[name]
    code = WITHOUT_COMPILER + (RUNS / name).read_text()
    (tmp_path / name).write_text(code)
    done = run_python([str(tmp_path / name), *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / result / "config.json").is_file()


def test_the_configurations_run(
    reader: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").symlink_to(reader / "corpus")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/smollm2").symlink_to(reader / "models/smollm2")
    instruct = tmp_path / "models/smollm2-instruct"
    instruct.mkdir()
    for file in (reader / "models/smollm2").iterdir():
        if file.name != "manifest.json":
            (instruct / file.name).write_bytes(file.read_bytes())
    (instruct / "chat_template.jinja").write_text(CHAT)
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 20)
    words = ["tokenize", "corpus/*.py", "--tokenizer", MODEL, "--output", "data/corpus"]
    assert main(words) == 0
    for name in ("finetune", "sft"):
        assert main(["train", str(RUNS / f"{name}.toml"), *TINY]) == 0
        rows = read_metrics(tmp_path / f"runs/{name}/metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
    assert (tmp_path / "runs/sft/final-ema/config.json").is_file()


COMMANDS = [line for line in (RUNS / "parallel.toml").read_text().splitlines() if "--parallel." in line]


def test_the_lines_for_several_processes_are_options() -> None:
    for line in COMMANDS:
        load_config(RUNS / "parallel.toml", line.removeprefix("#").split())
    assert len(COMMANDS) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", COMMANDS)
def test_the_lines_for_several_processes_run(options: str, reader: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "corpus").symlink_to(reader / "corpus")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "te_models"]
    words = [*launch, "train", str(RUNS / "parallel.toml"), *options.removeprefix("#").split(), *SHRUNK]
    done = run_python(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sys.platform != "linux" or any((tmp_path / "runs").glob("*/final/config.json"))
