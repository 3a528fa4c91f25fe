"""The main job, really run: every step on little text in every test run; on the small model as users get it, and on
SmolLM2-135M, with `make test-all`."""

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from te_models.cli.main import main
from te_models.compare_logits import load_theirs
from te_models.quickstart import main as quickstart
from te_models.quickstart import steps, tiny
from te_models.quickstart.report import Check, QuickstartReport
from te_models.quickstart.run import TINY, Run
from te_models.quickstart.steps import stored
from te_models.quickstart.text import library_files, middle_windows
from te_models.training import train

STEPS = {"0 prepare", "1 import", "2 quantize", "3 experts", "4 train", "5 export"}

# Dynamo looks at the `.grad` of every input of a graph, and a layer's input is not a leaf. It hides the warning that
# this gives by replacing `warnings.showwarning` (torch/_subclasses/meta_utils.py, safe_grad), so users never see it;
# here, where warnings are errors, it is raised before it would be shown.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def check_output(out: Path, layers: int) -> dict:
    """What every run leaves behind, looked at independently of the report."""
    report = json.loads((out / "report.json").read_text())
    assert [check for check in report["checks"] if not check["passed"]] == [] and report["passed"] is True
    assert len(report["checks"]) == 20 and set(report["seconds"]) == STEPS
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    curves = [report["numbers"][f"loss_{name}"] for name in ("bf16", "mxfp8")]
    assert len(curves[0]) == len(curves[1]) == report["numbers"]["train_batches"] >= 16
    assert curves[0] != curves[1] and curves[0][0] == pytest.approx(curves[1][0], rel=0.05)
    assert not (out / "scratch").exists()
    model = load_theirs(out / "hf-moe", torch.bfloat16)
    assert type(model).__name__ == "MixtralForCausalLM" and model.config.num_local_experts == 4
    assert model.config.num_hidden_layers == layers
    dense, moe = stored(out / "model"), stored(out / "moe")
    fc1 = dense["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(moe["decoder.layers.0.mlp.experts.linear_fc1.weight"], fc1.expand(4, *fc1.shape))
    return report


@pytest.mark.costs(120)
@pytest.mark.usefixtures("shared_tokenizer_process")
def test_every_step_on_little_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps and all checks, with a model that has hardly learned anything, and without the compiler."""
    sizes = replace(TINY, windows=4, length=64, most_perplexity=2.0 * tiny.VOCABULARY, new_tokens=8)
    sizes = replace(sizes, train_batches=16, windows_per_file=2, compared=4, train_length=32, train_batch=4)
    monkeypatch.setattr(quickstart, "TINY", sizes)
    files, held_out = library_files()
    monkeypatch.setattr(quickstart, "library_files", lambda: (files[:50], held_out))
    monkeypatch.setattr(quickstart, "tiny_folder", functools.partial(tiny.tiny_folder, steps=22))
    monkeypatch.setattr(tiny, "train", lambda c: train(c.replace(data=c.data.replace(micro_batch_size=2))))
    monkeypatch.setattr(steps, "train", lambda config: train(config.replace(compile=False)))
    assert main(["quickstart", "--offline-tiny", "--out", str(tmp_path / "out")]) == 0
    check_output(tmp_path / "out", layers=4)
    assert "all 20 checks passed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_offline_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quickstart", "--offline-tiny", "--out", str(out)]) == 0
    numbers = check_output(out, layers=4)["numbers"]
    text = capsys.readouterr().out
    assert "all 20 checks passed" in text
    assert "greedy text by te_models (KV cache) and by transformers" in text
    for name in ("bf16", "mxfp8"):
        assert numbers[f"perplexity_after_{name}"] < numbers["perplexity_before_training"]

    # Training that damages the model is noticed: the same step again, with fifty times the learning rate.
    failed = {
        check.what for check in train_again(out, tmp_path, learning_rate=50 * TINY.learning_rate) if not check.passed
    }
    for name in ("bf16", "mxfp8"):
        assert any(what.startswith(f"{name}: perplexity on held-out text") for what in failed)
        assert any(what.startswith(f"{name}: mean loss on the last") for what in failed)


def train_again(out: Path, tmp_path: Path, **changes: float) -> list[Check]:
    """Run the training step of a finished quickstart once more with other sizes, and return its checks."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "hf-moe")
    sizes = replace(TINY, **changes)
    training_files, held_out = library_files()
    windows = middle_windows(tokenizer, held_out, sizes.windows, sizes.length)
    scratch, again = tmp_path / "scratch", tmp_path / "again"
    scratch.mkdir()
    shutil.copytree(out / "moe", again / "moe")
    report = QuickstartReport(verbose=False)
    report.begin("4 train")
    steps.train_experts(
        Run(
            out=again,
            scratch=scratch,
            hf=out,
            sizes=sizes,
            recipe="mxfp8",
            tokenizer=tokenizer,
            windows=windows,
            training_files=training_files,
            report=report,
        )
    )
    return report.checks


@pytest.mark.real
@pytest.mark.slow
def test_the_real_quickstart(tmp_path: Path) -> None:
    """In a process of its own, so that the measured memory is the quickstart's."""
    out = tmp_path / "out"
    run = subprocess.run(
        [sys.executable, "-m", "te_models", "quickstart", "--json", "--out", str(out)], stdout=subprocess.PIPE
    )
    assert run.returncode == 0
    report = check_output(out, layers=30)
    assert json.loads(run.stdout) == report and report["numbers"]["perplexity"] < 12
    assert report["peak_rss_gib"] < 6


def test_a_foreign_folder_is_not_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("42")
    assert main(["quickstart", "--offline-tiny", "--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "42"
