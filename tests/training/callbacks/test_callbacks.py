"""Callbacks are told events and lose nothing by an error; evaluations by others' code; the upload with its card."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from te_models import GPTModel, training
from te_models.child_process import import_path
from te_models.config import ConfigError
from te_models.training.callbacks import load_installed
from te_models.training.config.precision import RecipePhase
from te_models.training.log.starts import record_start
from tests.training.runs import assert_same_bits, tensors_under, tiny_run

LOSS = training.EvaluationConfig(every=2, batches=1)


class Notes(training.Callback):
    """Notes what it is told on one of so many ranks; fails where asked, once."""

    def __init__(self, fail: str = "", step: int = 3, rank: int = 0, ranks: int = 1) -> None:
        self.told: list[tuple[str, int, Any]] = []
        self.fail, self.step, self.place = fail, step, (rank, ranks)

    def note(self, event: str, run: training.RunView, value: Any = None) -> None:
        assert (run.rank, run.ranks) == self.place
        self.told.append((event, run.step, value))
        if event == self.fail and run.step >= self.step:
            raise RuntimeError("no more")

    def on_begin(self, run: training.RunView) -> None:
        assert isinstance(run.model, GPTModel) or run.ranks > 1
        self.note("on_begin", run)

    def on_step(self, run: training.RunView, loss: float) -> None:
        self.note("on_step", run, loss)

    def on_evaluate(self, run: training.RunView, numbers: Mapping[str, float]) -> None:
        self.note("on_evaluate", run, dict(numbers))

    def on_log(self, run: training.RunView, row: Mapping[str, Any]) -> None:
        self.note("on_log", run, row["loss"])

    def on_save(self, run: training.RunView, checkpoint: Path) -> None:
        assert checkpoint.is_dir()
        self.note("on_save", run, checkpoint.name)

    def on_end(self, run: training.RunView, result: Any) -> None:
        self.note("on_end", run, result.step)


def weight_norm(model: GPTModel) -> dict[str, float]:
    """An evaluation, which a configuration can name."""
    assert not model.training and not torch.is_grad_enabled()
    return {"norm": float(model.embedding.word_embeddings.weight.norm())}


def run_of(tmp_path: Path, name: str = "run", **changes: Any) -> training.TrainConfig:
    return tiny_run(tmp_path, name, **({"steps": 4, "evaluation": LOSS} | changes))


def test_what_a_callback_is_told(tmp_path: Path) -> None:
    notes = Notes()
    evaluations = {"own": lambda model: torch.tensor(1.5), "weights": weight_norm}
    result = training.train(run_of(tmp_path), callbacks=[notes], evaluations=evaluations)
    rows = training.read_metrics(result.metrics_file)
    events = [(event, step) for event, step, _ in notes.told]
    of_step = [[("on_step", s), *([("on_evaluate", s)] if s % 2 == 0 else []), ("on_log", s)] for s in (1, 2, 3, 4)]
    saved = [[], [("on_save", 2)], [], [("on_save", 4)]]
    expected = [event for told, kept in zip(of_step, saved, strict=True) for event in told + kept]
    assert events == [("on_begin", 0), *expected, ("on_end", 4)]
    losses = [value for event, _, value in notes.told if event in ("on_step", "on_log")]
    assert losses == [loss for row in rows for loss in (row["loss"], row["loss"])]
    numbers = [value for event, _, value in notes.told if event == "on_evaluate"]
    assert [set(n) for n in numbers] == [{"validation_loss", "own", "weights/norm"}] * 2
    assert rows[1]["evaluations"] == {"own": 1.5, "weights/norm": numbers[0]["weights/norm"]}
    assert "evaluations" not in rows[0] and rows[3]["validation_loss"] == numbers[1]["validation_loss"]


@pytest.mark.parametrize("event", ["on_step", "on_evaluate", "on_log", "on_save", "on_end"])
def test_an_error_names_its_callback_and_loses_nothing(tmp_path: Path, event: str) -> None:
    config = run_of(tmp_path)
    step = {"on_evaluate": 4, "on_save": 4, "on_end": 4}.get(event, 3)
    kept = "the run is complete: " if event == "on_end" else f"step {step} of 4 is saved in "
    with pytest.raises(training.CallbackError) as caught:
        training.train(config, callbacks=[Notes(event)])
    name = "tests.training.callbacks.test_callbacks:Notes"
    said = f"the callback {name} failed in {event} at step {step}: RuntimeError: no more; "
    assert str(caught.value).startswith(said + kept) and isinstance(caught.value.__cause__, RuntimeError)
    assert training.latest_checkpoint(tmp_path / "run").name == f"step-{step:08d}"
    training.train(config)  # goes on
    if event == "on_step":
        training.train(run_of(tmp_path, "whole"))
        assert_same_bits(*(tensors_under(tmp_path / name / "final") for name in ("run", "whole")))


def test_evaluations_that_fail_and_those_of_a_configuration(tmp_path: Path) -> None:
    name = "tests.training.callbacks.test_callbacks:weight_norm"
    config = run_of(tmp_path, evaluation=LOSS.replace(functions=(f"weights={name}",)))
    with pytest.raises(training.CallbackError, match=r"evaluation odd failed at step 2: TypeError: it returned a str"):
        training.train(config, evaluations={"odd": lambda model: "much"})
    assert training.read_metrics(training.train(config).metrics_file)[3]["evaluations"].keys() == {"weights/norm"}
    gone = LOSS.replace(functions=("a=tests.training.callbacks.test_callbacks:gone",))
    with pytest.raises(ConfigError, match=r"evaluation\.functions has '.*:gone', and .* has no 'gone'"):
        training.train(config.replace(evaluation=gone))
    with pytest.raises(ConfigError, match=r'evaluation\.functions is .*; allowed: "name=package\.module:function"'):
        LOSS.replace(functions=("a",))


def test_a_task_that_does_not_exist_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness here knows none."""
    tasks = SimpleNamespace(TaskManager=lambda **_: SimpleNamespace(match_tasks=lambda names: []))
    for name, module in {"lm_eval": SimpleNamespace(tasks=tasks), "lm_eval.tasks": tasks}.items():
        monkeypatch.setitem(sys.modules, name, module)
    config = run_of(tmp_path, evaluation=LOSS.replace(tasks=("nothing",)))
    config = config.replace(model=config.model.replace(config=None, path=str(tmp_path)))
    said = "evaluation.tasks 'nothing' is no task of lm-evaluation-harness or of evaluation.task_folder"
    with pytest.raises(ConfigError, match=said):
        training.train(config)
    assert not Path(config.output_dir).exists()


def test_named_callbacks_are_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory is not imported, wherever Python put that in the path."""
    (tmp_path / "stranger.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    for entry in ("", str(tmp_path), "."):
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
        with pytest.raises(ConfigError, match=r"callbacks has 'stranger:Stop', and no module 'stranger' is installed"):
            training.train(run_of(tmp_path, callbacks=("stranger:Stop",)))
    monkeypatch.undo()
    # an editable package is installed in the folder itself, by an entry behind the environment's packages
    (tmp_path / "own_callbacks.py").write_text("value = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert import_path()[-1] == str(tmp_path) and load_installed("own_callbacks:value", "callbacks") == 3
    monkeypatch.undo()
    for name, said in {
        "te_models": "callbacks has 'te_models'; allowed: \"package.module:name\"",
        "te_models.training:gone": "te_models.training has no 'gone'",
        "te_models.training:list_checkpoints": "list_checkpoints cannot be made: TypeError: ",
        "math:pi": "which is a float; allowed: a te_models.training.Callback",
    }.items():
        with pytest.raises((ConfigError, training.CallbackError), match=said):
            training.train(run_of(tmp_path, callbacks=(name,)))


class Named(Notes):
    """A callback that a configuration names."""

    made: ClassVar[list[Named]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)


def test_a_named_callback_is_made_and_told(tmp_path: Path) -> None:
    own = importlib.import_module("tests.training.callbacks.test_callbacks")
    own.Named.made.clear()
    training.train(run_of(tmp_path, callbacks=("tests.training.callbacks.test_callbacks:Named",), steps=2))
    assert [told.told[-1][0] for told in own.Named.made] == ["on_end"]


class Api:
    """Stands in for huggingface_hub.HfApi."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, **options: Any) -> None:
        self.calls.append(("HfApi", options))

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, **options: Any) -> SimpleNamespace:
        card = (Path(options["folder_path"]) / "README.md").read_text()
        self.calls.append(("upload_folder", {**options, "card": card}))
        return SimpleNamespace(commit_url="https://hub/me/model/commit/1")


def test_a_card_says_what_changes_during_a_run(tmp_path: Path) -> None:
    """Recipes, what weights are rounded to, the weights of a blend, the teacher."""
    (tmp_path / "run/final").mkdir(parents=True)
    (tmp_path / "run/final/config.json").write_text("{}")
    phases = RecipePhase(from_step=3, recipe="nvfp4"), RecipePhase(from_share=0.9, passes="forward")
    blend = training.DataConfig(blend=("a=1", "b=1"), blend_steps=("5: a=0, b=1",))
    rounded = training.PrecisionConfig(qat="nvfp4", qat_activations=True)
    for changes, fact in (
        (
            {"precision": training.PrecisionConfig(schedule=phases)},
            "none, nvfp4 from step 3 on, none (forward) from 90% of the",
        ),
        ({"precision": rounded}, "precision | bf16, recipe none, weights and inputs rounded to nvfp4 |"),
        ({"data": blend}, "| data | a=1, b=1; from step 5: a=0, b=1 |"),
        (
            {"posttraining": training.PosttrainingConfig(method="distill", teacher="big")},
            "method | distill from big, all w",
        ),
    ):
        record_start(tmp_path / "run", run_of(tmp_path, steps=20, **changes), 0, "cpu", 1)
        assert fact in training.model_card(tmp_path / "run")


def test_the_result_is_uploaded_with_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    for name in ("utils", "errors"):  # the package has them once somebody imported them
        monkeypatch.delattr(sys.modules["huggingface_hub"], name, raising=False)
    Api.calls.clear()
    config = run_of(tmp_path, hub=training.HubConfig(repo_id="me/model"), steps=2)
    for token, said in ((None, "without a token; allowed: after `hf auth login`, or with HF_TOKEN"), ("hf_x", "")):
        monkeypatch.setattr("huggingface_hub.get_token", lambda token=token: token)
        if said:
            with pytest.raises(training.CallbackError, match=f"failed in on_begin at step 0: ConfigError: .*{said}"):
                training.train(config)
    with pytest.raises(ConfigError, match=r"hub\.repo_id is 'my model'; allowed: organisation/name, of letters"):
        training.train(config.replace(hub=training.HubConfig(repo_id="my model")))
    result = training.train(config, evaluations={"own": lambda model: 0.25})
    assert [name for name, _ in Api.calls] == ["HfApi", "create_repo", "upload_folder"]
    assert Api.calls[1][1] == {"repo_id": "me/model", "private": True, "exist_ok": True}
    uploaded = Api.calls[2][1]
    assert uploaded["folder_path"] == str(result.model_dir) and uploaded["revision"] is None
    card = uploaded["card"]
    assert card == training.model_card(tmp_path / "run")
    assert card.startswith("---\nlibrary_name: te_models\n---\n\n# run\n")
    rows = training.read_metrics(result.metrics_file)
    facts = {"steps": "2 of 2", "model": "random weights", "precision": "fp32, recipe none", "own": "0.2500"}
    facts |= {name.replace("_", " "): f"{rows[-1][name]:.4f}" for name in ("loss", "validation_loss")}
    assert all(f"| {name} | {fact} |" in card for name, fact in facts.items()), card
    assert f"torch {torch.__version__}" in card and '"sequence_length": 32' in card
    assert (result.model_dir / "README.md").read_text() == card
    training.push_to_hub(tmp_path / "run", "me/model", revision="v2")
    branch = ("create_branch", {"repo_id": "me/model", "branch": "v2", "exist_ok": True})
    assert Api.calls[-2] == branch and Api.calls[-1][1]["revision"] == "v2"
    with pytest.raises(ConfigError, match=r"has no final/config\.json or no starts\.jsonl"):
        training.model_card(tmp_path)
    assert isinstance(training.PushToHub("me/model"), training.Callback)
