"""The scripts, configurations and the notebook in examples/ run, each with a small model in place of the real one."""

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.cli.main import main
from te_models.parallel import ParallelDims
from te_models.training import load_config, read_metrics
from tests.byte_tokenizer import byte_tokenizer
from tests.fork_server import run_python
from tests.structure.test_documented_code import WITHOUT_COMPILER, reader  # noqa: F401  a folder with small models
from tests.training.runs import tiny_model

RUNS = Path(__file__).parents[2] / "examples"
CHAT = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""
SMALL = ["--steps", "2", "--length", "32"]
MODEL, INSTRUCT = "models/smollm2", "models/smollm2-instruct"
PYTHON = ["--hidden", "64", "--no-compile", *SMALL]
SCRIPTS = {
    "pretrain_dense.py": (["corpus/*.py", *PYTHON], "runs/dense/final"),
    "pretrain_moe.py": (["corpus/*.py", *PYTHON], "runs/moe"),
    "upcycle.py": ([MODEL, "corpus/*.py", "--no-compile", *SMALL], "runs/upcycled/final"),
    "trainer_transformers.py": ([MODEL, "corpus/a.py", *SMALL], "runs/trainer/final"),
    "trainer_trl.py": ([INSTRUCT, "chats.jsonl", *SMALL], "runs/trl/final"),
    "trainer_trl_dpo.py": ([MODEL, "--steps", "2"], "runs/trl-dpo/final"),
    "trainer_trl_reward.py": ([MODEL, "--steps", "2"], "runs/trl-reward/final"),
    "trainer_trl_grpo.py": ([MODEL, "--steps", "2"], "runs/trl-grpo/final"),
    "recipe_comparison.py": (["corpus/*.py", "--recipes", "none", "mxfp8", *PYTHON], "runs/recipes/mxfp8/final"),
    "port_of_a_transformer_engine_script.py": (["--hidden", "32", "--length", "8", "--steps", "2"], ""),
}
"""Script: its arguments, and the model folder that it leaves, if any."""
EXTRAS = {"trainer_transformers.py": "accelerate", "recipe_comparison.py": "matplotlib"}
EXTRAS |= dict.fromkeys((name for name in SCRIPTS if name.startswith("trainer_trl")), "trl")
"""Script: the package that it needs beside those of the tests."""
CONFIGURATIONS = ("finetune.toml", "sft_chat.toml", "lora.toml", "qlora_fp8.toml")
RANKS = ("ranks/fsdp2.toml", "ranks/tp.toml", "ranks/ep.toml", "ranks/pp.toml")
TINY = ["--steps", "2", "--no-compile", "--data.sequence-length", "32", "--data.micro-batch-size", "1"]
TINY += ["--schedule.warmup-steps", "1", "--data.validation-fraction", "0.2", "--evaluation.batches", "1"]
SHRUNK = ["--model.config.hidden-size", "32", "--model.config.num-layers", "2", "--steps", "2", "--no-compile"]
SHRUNK += ["--data.sequence-length", "32", "--device", "cpu"]


def test_every_file_is_run_here_and_indexed() -> None:
    files = {path.relative_to(RUNS).as_posix() for path in RUNS.rglob("*.*")} - {"README.md"}
    gallery = {name for name in files if name.startswith("configs/")}  # test_gallery runs them
    assert files == {*SCRIPTS, *CONFIGURATIONS, *RANKS, *gallery, "quickstart.ipynb"}
    index = (RUNS / "README.md").read_text()
    assert [name for name in sorted(files) if f"]({name})" not in index] == []


def test_examples_are_short() -> None:
    lengths = {name: len((RUNS / name).read_text().splitlines()) for name in (*SCRIPTS, *CONFIGURATIONS, *RANKS)}
    assert {name: length for name, length in lengths.items() if length > 64} == {}


def furnish(folder: Path, reader: Path) -> None:  # noqa: F811
    """Put what the examples name into a folder: a model, the same with a chat template, a text, chats."""
    (folder / "corpus").symlink_to(reader / "corpus")
    (folder / "models").mkdir()
    (folder / MODEL).symlink_to(reader / MODEL)
    instruct = folder / INSTRUCT
    instruct.mkdir()
    for file in (reader / MODEL).iterdir():
        if file.name != "manifest.json":
            (instruct / file.name).write_bytes(file.read_bytes())
    (instruct / "chat_template.jinja").write_text(CHAT)
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 20)


@pytest.mark.sentinels("pretrain_dense.py", "pretrain_moe.py", "port_of_a_transformer_engine_script.py")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, reader: Path, tmp_path: Path) -> None:  # noqa: F811
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    furnish(tmp_path, reader)
    arguments, result = SCRIPTS[name]
    code = WITHOUT_COMPILER + (RUNS / name).read_text()
    (tmp_path / name).write_text(code)
    done = run_python([str(tmp_path / name), *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not result or (tmp_path / result / "config.json").is_file()
    assert "loss" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "lr", "least"), [("dpo", 30, 1e-3, 0.9), ("reward", 30, 1e-3, 0.9), ("grpo", 80, 5e-3, 0.4)]
)
def test_a_score_becomes_better(name: str, steps: int, lr: float, least: float, tmp_path: Path) -> None:
    """With TRL's trainers, of a model of random weights."""
    pytest.importorskip("trl")
    torch.manual_seed(0)
    model = GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer(["word: a"]).save_pretrained(tmp_path / "model")
    words = [str(RUNS / f"trainer_trl_{name}.py"), "model", "--steps", str(steps), "--lr", str(lr)]
    done = run_python(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"^score ([\d.]+) before, ([\d.]+) after", done.stdout, re.MULTILINE)
    assert float(found[2]) > float(found[1]) + 0.2 and float(found[2]) >= least


@pytest.mark.usefixtures("shared_tokenizer_process")
@pytest.mark.sentinels("sft_chat")
@pytest.mark.parametrize("name", ["finetune", "sft_chat", "lora", "qlora_fp8"])
def test_a_configuration_runs(
    name: str,
    reader: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, reader)
    if name == "finetune":
        assert main(["tokenize", "corpus/*.py", "--tokenizer", MODEL, "--output", "data/corpus"]) == 0
    assert main(["train", str(RUNS / f"{name}.toml"), *TINY]) == 0
    output = Path(load_config(RUNS / f"{name}.toml").output_dir)
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == [1, 2]
    left = {"finetune": "final", "sft_chat": "final-ema"}.get(name, "adapter-hf")
    assert (output / left).is_dir() and (output / "final/config.json").is_file()


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order, and the text below each is what it prints."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((RUNS / "quickstart.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    names: dict[str, Any] = {"__name__": "__main__"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for cell in notebook["cells"]:
        assert cell["id"] and cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
            shown = "".join(text for output in cell["outputs"] for text in output["text"])
            assert printed.getvalue() == shown, cell["id"]
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RANKS)
def test_a_layout_says_its_command(name: str) -> None:
    config = load_config(RUNS / name)
    dims = ParallelDims.of(dataclasses.asdict(config.parallel), 2)
    assert [key for key, size in dims.sizes().items() if size == 2 and "replicate" not in key]
    assert f"torchrun --nproc-per-node 2 -m te_models train examples/{name}" in (RUNS / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_a_layout_runs(name: str, reader: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "corpus").symlink_to(reader / "corpus")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "te_models"]
    words = [*launch, "train", str(RUNS / name), *SHRUNK]
    done = run_python(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sys.platform != "linux" or any((tmp_path / "runs").glob("*/final/config.json"))
