"""Recipes that change during a run: they switch at their step, resume bit for bit and compile once each."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.layers import recipe
from te_models.training import (
    CheckpointConfig,
    LogConfig,
    ModelSource,
    PrecisionConfig,
    ScheduleConfig,
    load_config,
    train,
)
from te_models.training.config.precision import RecipePhase
from te_models.training.log.report import RunRecord, charts
from te_models.training.precision import RecipeSchedule
from tests.training.processes import train_as_one_and_two
from tests.training.runs import assert_continues_as, cut_after, rows_of, tiny_model, tiny_run

ONE_LAYER = ModelSource(config=tiny_model(layers=1))
WARM_UP = PrecisionConfig(  # bf16, then two recipes with state, the last steps with a forward pass in high precision
    dtype="fp32",
    cache_weights=True,
    schedule=(
        RecipePhase(from_step=2, recipe="delayed"),
        RecipePhase(from_step=3, recipe="nvfp4"),
        RecipePhase(from_share=2 / 3, recipe="none", passes="forward"),
        RecipePhase(from_step=6, recipe="delayed", recipe_options=("amax_history_len=2",)),
    ),
)


def scheduled(tmp_path: Path, name: str = "whole", **changes: Any) -> Any:
    values = {"steps": 6, "precision": WARM_UP, "model": ONE_LAYER}
    values["checkpoint"] = CheckpointConfig(every=1, keep_last=0)
    return tiny_run(tmp_path, name, **(values | changes))


def test_a_run_continues_bit_for_bit_before_at_and_after_each_switch(tmp_path: Path) -> None:
    whole = scheduled(tmp_path)
    train(whole)
    recipes = ["none", "delayed", "nvfp4", "nvfp4", "none (forward)", "delayed"]
    assert [row["recipe"] for row in rows_of(whole)] == recipes
    for step in range(1, 6):
        assert_continues_as(cut_after(whole, f"cut{step}", step), whole)


def test_a_step_computes_what_a_run_under_its_recipe_alone_computes(tmp_path: Path) -> None:
    """The first phase is that of a run without a schedule, and the second differs from what that would go on with."""
    losses = []
    for phases in ((), (RecipePhase(from_step=3, recipe="none"),)):
        precision = PrecisionConfig(dtype="fp32", recipe="nvfp4", schedule=phases)
        run = scheduled(tmp_path, f"run{len(phases)}", steps=4, precision=precision)
        train(run)
        losses.append([row["loss"] for row in rows_of(run)])
    assert losses[0][:2] == losses[1][:2] and losses[0][2:] != losses[1][2:]


def test_the_switch_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precision = PrecisionConfig(dtype="fp32", recipe="mxfp8", schedule=(RecipePhase(from_share=0.5, recipe="none"),))
    run = scheduled(tmp_path, steps=4, precision=precision, log=LogConfig(progress=False, plot=True))
    train(run)
    assert "step 3: from here on under the recipe none" in capfd.readouterr().err
    record = RunRecord.read(Path(run.output_dir), "run")
    assert "step 3: from here on under the recipe none" in record.events()
    assert 'class="mark"' in dict(charts([record]))["Loss in nats per token (dashed: validation)"]
    assert (Path(run.output_dir) / "loss.png").exists()


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_ranks_switch_together(layout: str, tmp_path: Path) -> None:
    """Two stages, or two shards, follow the curve of one rank."""
    phases = (RecipePhase(from_step=2, recipe="mxfp8"), RecipePhase(from_step=3, recipe="none", passes="forward"))
    precision = PrecisionConfig(dtype="fp32", schedule=phases)
    one = scheduled(tmp_path, "one", steps=4, precision=precision, model=ModelSource(config=tiny_model()))
    two = train_as_one_and_two(one, tmp_path, layout)
    assert [row["recipe"] for row in rows_of(two)] == ["none", "mxfp8", "none (forward)", "none (forward)"]
    for ours, theirs in zip(rows_of(two), rows_of(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)


@pytest.mark.slow
def test_each_recipe_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what Dynamo makes, and not what Inductor makes of it, is counted here
    monkeypatch.setattr("te_models.training.step.backend_for", lambda model: "aot_eager")
    phases = (RecipePhase(from_step=3, recipe="mxfp8"), RecipePhase(from_step=5, recipe="none", passes="forward"))
    run = scheduled(tmp_path, compile=True, precision=PrecisionConfig(schedule=phases))
    run = run.replace(data=run.data.replace(validation_fraction=0.0), checkpoint=CheckpointConfig(every=0))
    train(run)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_what_comes_later_may_change_and_what_has_been_may_not(tmp_path: Path) -> None:
    phases = (RecipePhase(from_share=0.5, recipe="none"),)
    run = scheduled(tmp_path, steps=2, precision=PrecisionConfig(dtype="fp32", recipe="mxfp8", schedule=phases))
    run = run.replace(schedule=ScheduleConfig(kind="constant"))
    train(run)
    with pytest.raises(ConfigError, match=r"had none from step 2 and would have one recipe"):
        train(run.replace(steps=8))
    later = (RecipePhase(from_step=2, recipe="none"), RecipePhase(from_step=3, recipe="current"))
    train(run.replace(steps=3, precision=run.precision.replace(schedule=later)))
    assert [row["recipe"] for row in rows_of(run)] == ["mxfp8", "none", "current"]


TOML = """
output_dir = "unused"
steps = 1000
[model]
name = "Llama-3.2-1B"
[data]
path = "unused"
sequence_length = 8
micro_batch_size = 1
[precision]
recipe = "nvfp4"
"""


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('from_share = 0.9\nrecipe = "nvf4"', "[[precision.schedule]] table 1 recipe is 'nvf4'; allowed: 'none'"),
        ("from_share = 1.5", "table 1 from_share is 1.5; allowed: a number above 0 and below 1"),
        ("from_share = 0.5\nfrom_step = 3", "table 1 from_step is 3; allowed: a step, or from_share in its place"),
        ('recipe = "mxfp8"', "table 1 from_step is None; allowed: a step, or from_share in its place"),
        ("from_step = 1", "table 1 from_step is 1; allowed: an integer above 1"),
        ("from_stp = 9", "table 1 has no key 'from_stp'"),
        ('from_step = 9\nrecipe = "delayed"\npasses = "forward"', "table 1 recipe is 'delayed'; allowed: a recipe"),
        ('from_step = 9\noverrides = ["*=bf16"]', "table 1 overrides is ('*=bf16',); allowed: empty without"),
        ("from_step = 901\n[[precision.schedule]]\nfrom_share = 0.9", "'from_share = 0.9 in table 2'; allowed"),
        ("from_step = 1001", "'from_step = 1001 in table 1'; allowed: a phase within steps = 1000"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"{TOML}[[precision.schedule]]\n{text}\n")
    assert main(["train", str(file), "--dry-run"]) == 2 and sentence in capsys.readouterr().err


def test_an_option_takes_tables_as_toml_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    words = ["--precision.schedule", '{from_share = 0.9, recipe = "none", passes = "forward"}']
    assert load_config(file, words).precision.schedule == (RecipePhase(from_share=0.9, passes="forward"),)


def test_recipes_whose_passes_belong_together_are_refused() -> None:
    phases = (RecipePhase(from_step=2, passes="forward"),)
    for options in ({"recipe": "delayed"}, {"recipe": "mxfp8", "overrides": ("*.a=delayed",)}):
        with pytest.raises(ConfigError, match=r"beside the recipe 'delayed', which takes its scales from a history"):
            RecipeSchedule(PrecisionConfig(schedule=phases, **options), 4, 1)
    options = {"recipe": "mxfp8", "recipe_options": ("backward_override=dequantized",)}
    with pytest.raises(ConfigError, match="beside the recipe 'mxfp8', which has a backward_override"):
        RecipeSchedule(PrecisionConfig(schedule=phases, **options), 4, 1)
    assert RecipeSchedule(PrecisionConfig(recipe="mxfp8"), 4, 1).now == recipe("mxfp8")
