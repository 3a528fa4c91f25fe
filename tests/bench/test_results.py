"""What benchmarks write down beside their numbers, what runs without a name, and that every recipe can be chosen."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench import common, recipe_gap, recipe_step, training_curves
from bench.commit import AT_START, ROOT, commit
from bench.recipes import CUSTOM, NAMES, named
from bench.shapes import Shape
from bench.steps import our_step
from te_models.layers import RECIPES


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    run = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "bench/results").mkdir(parents=True)
    for name in ("kernel.py", "bench/results/one.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_result_names_its_commit_and_what_differs_from_it(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "bench/results/one.json").write_text("2")  # written by the benchmark before
    assert commit(checkout) == {"commit": head, "changed": []}
    (checkout / "kernel.py").write_text("2")
    (checkout / "new.py").write_text("1")
    assert commit(checkout) == {"commit": head, "changed": ["kernel.py", "new.py"]}


def test_where_the_commit_cannot_be_known_a_result_says_why(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "vendored").mkdir()
    assert commit(checkout / "vendored") == {"commit": None, "why": "the source is not a checkout of its own"}
    found = commit(tmp_path_factory.mktemp("plain"))
    assert found["commit"] is None and "not a git repository" in found["why"]
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) == {"commit": None, "why": "git is not installed"}


def test_every_result_is_written_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    written = json.loads(common.write_result("some", {"cases": [1]}).read_text(encoding="utf-8"))
    assert written["measured_at"] == AT_START and written["cases"] == [1]


def test_parts_that_are_measured_again_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    payload = {"versions": common.versions("torch"), "calls": 1, "cold": 2}
    file = common.write_result("some", payload)
    before = json.loads(file.read_text(encoding="utf-8")) | {"measured_at": {"commit": "older", "changed": []}}
    file.write_text(json.dumps(before))
    after = json.loads(common.update_result("some", {"calls": 3}, ["torch"]).read_text(encoding="utf-8"))
    assert after == before | {"calls": 3, "measured_apart": {"calls": AT_START}}
    file.write_text(json.dumps(before | {"versions": {}}))
    with pytest.raises(ValueError, match=r"has versions .*, and here it is"):
        common.update_result("some", {"calls": 3}, ["torch"])
    assert json.loads(file.read_text(encoding="utf-8"))["calls"] == 1


def test_results_of_other_instructions_lie_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of another kind overwrites nothing, and its parts are measured again in its own file."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    here = common.machine()
    payload = {"versions": common.versions("torch"), "calls": 1}
    file = common.write_result("some", payload)
    first = file.read_bytes()
    monkeypatch.setattr(common, "machine", lambda: here | {"cpu_flags": ["avx2", "avx512f"]})
    with pytest.raises(ValueError, match=r"some.avx512f.json does not exist yet on this kind of machine; measure all"):
        common.update_result("some", {"calls": 3}, ["torch"])
    beside = common.write_result("some", payload)
    common.update_result("some", {"calls": 3}, ["torch"])
    assert beside.name == "some.avx512f.json" and json.loads(beside.read_text())["calls"] == 3
    assert file.read_bytes() == first and sorted(tmp_path.iterdir()) == [beside, file]


def ran(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> list[list[str]]:
    """The benchmarks that the command starts, each with its arguments."""
    seen: list[list[str]] = []

    def run(started: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert started[:2] == [sys.executable, "-m"]
        seen.append(started[2:])
        return subprocess.CompletedProcess(started, 0)

    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.main(arguments) == 0
    return seen


def test_what_is_left_out_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every benchmark of the folder runs or is left out aloud."""
    folder = ROOT / "bench"
    programs = {
        f.stem for f in folder.glob("*.py") if f.stem != "__main__" and 'if __name__ == "__main__"' in f.read_text()
    }
    whole = {words[0].removeprefix("bench.") for words in ran(monkeypatch, []) if len(words) == 1}
    said = capsys.readouterr().out
    left = {name for name in programs | {"gpu"} if f"== left out: {name}: " in said}
    assert (whole | left, whole & left) == (programs | {"gpu"}, set())
    assert {"recipe_step", "training_curves"} <= left


def test_all_of_them_run_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started = ran(monkeypatch, ["--all"])
    assert ["bench.recipe_step"] in started and ["bench.training_curves"] in started
    assert all(len(words) == 1 for words in started)
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines() if "left out" in line] == [
        "eager_calls",
        "limited",
        "gpu",
    ]
    assert ran(monkeypatch, ["recipe_step"]) == [["bench.recipe_step"]]
    with pytest.raises(SystemExit):
        command.main(["recipe_steps"])
    assert "there is no benchmark 'recipe_steps'; allowed: train_step" in capsys.readouterr().err


def test_every_recipe_is_measured() -> None:
    assert {*NAMES} == {*RECIPES} - {"per_module"}, "a recipe of recipes has no numbers of its own"
    assert {*recipe_step.TARGETS} == {*training_curves.BOUNDS} == {*NAMES}
    assert named("bf16") is None and named("custom") is CUSTOM


def test_a_gap_is_noise_unless_it_is_beyond_the_variants_that_are_no_recipe() -> None:
    losses = {"bf16": [2.0, 4.0, 2.0], "fp32": [2.0, 4.0, 2.02], "perturbed": [2.0, 4.0, 2.0]}
    losses |= {"mxfp8": [2.01, 4.03, 2.012], "nvfp4": [2.2, 4.4, 2.21]}
    found = recipe_gap.gaps_of({name: [[9.0, loss] for loss in runs] for name, runs in losses.items()}, 2, 1)
    assert found["nvfp4"]["per_seed"] == [10.0, 10.0, 10.5] and found["nvfp4"]["beyond_noise"]
    assert found["nvfp4"]["mean"] == 10.167
    assert found["nvfp4"]["half_width"] == pytest.approx(4.303 * 0.28868 / 3**0.5, abs=1e-3)
    assert not found["mxfp8"]["beyond_noise"], "0.6 %, where fp32 is 1 % away with a seed"


def test_a_step_runs_under_the_recipe_it_is_given(tmp_path: Path) -> None:
    """Eagerly and tiny: the first losses are near those of bf16, and not the same."""
    shape = Shape("tiny", hidden=128, layers=1, ffn=128, batch=1, sequence=32, vocab=128)
    shape.write_random_model(tmp_path)
    ids = shape.input_ids()
    losses = {}
    for name in ("bf16", *NAMES):
        step = our_step(tmp_path, ids, compiled=False, recipe=named(name))
        losses[name] = torch.stack([step() for _ in range(2)])
    for name in NAMES:
        assert not torch.equal(losses[name], losses["bf16"]), name
        torch.testing.assert_close(losses[name], losses["bf16"], rtol=0.02, atol=0)
