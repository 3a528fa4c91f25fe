"""Recipes in training: their state survives a resume bit for bit, layers are chosen by name, statistics are written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.config import ConfigError
from te_models.layers import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, PerModuleRecipe
from te_models.layers.gemm.scaling import record_statistics
from te_models.training import EvaluationConfig, LogConfig, ModelSource, PrecisionConfig, latest_checkpoint, train
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.metrics import finite
from te_models.training.precision import build_recipe
from tests.layers.matrix_recipes import DEVICES
from tests.training.runs import assert_continues_as, curve, cut_after, rows_of, tiny_model, tiny_run

ONE_LAYER = ModelSource(config=tiny_model(layers=1))


@pytest.mark.sentinels("delayed-dense-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_a_resumed_run_continues_bit_for_bit(name: str, moe: bool, device: str, tmp_path: Path) -> None:
    precision = PrecisionConfig(dtype="fp32", recipe=name, cache_weights=True)
    whole = tiny_run(tmp_path, "whole", moe=moe, steps=4, precision=precision, device=device)
    train(whole)
    halves = cut_after(whole, "halves", 1)
    assert latest_checkpoint(Path(halves.output_dir)).name.endswith("2")
    assert_continues_as(halves, whole)
    state = load_state(latest_checkpoint(Path(halves.output_dir))).tensors
    kept = {key.rpartition(".")[2] for key in state if key.startswith("recipe.decoder.")}
    assert kept >= ({"fp8_scale", "fp8_history"} if name == "delayed" else {"fp8_rng_state"})


def test_losses_depend_on_the_rounding_seed_and_on_nothing_else(tmp_path: Path) -> None:
    precision = PrecisionConfig(dtype="fp32", recipe="nvfp4")
    runs = [tiny_run(tmp_path, f"run{i}", steps=2, precision=precision) for i in range(2)]
    for run in runs:
        train(run)
    assert curve(runs[0]) == curve(runs[1])


def test_statistics_reach_the_metrics(tmp_path: Path) -> None:
    precision = PrecisionConfig(dtype="fp32", recipe="mxfp8", overrides=("*.linear_proj=bf16",))
    config = tiny_run(tmp_path, steps=3, precision=precision, log=LogConfig(progress=False, statistics_every=2))
    train(config)
    rows = rows_of(config)
    assert ["quantization" in row for row in rows] == [False, True, True]
    found = rows[1]["quantization"]
    layers = {"self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"}
    names = {key.split(".", 3)[3].rpartition(".")[0] for key in found}
    assert names == layers, "linear_proj runs in high precision and is not quantized"
    assert {key.rpartition(".")[2] for key in found} == {"input", "weight", "grad_output"}
    assert all(values["amax"] > 0 and values["saturation"] <= 1 for values in found.values())


def test_statistics_are_of_the_training_data(tmp_path: Path) -> None:
    """A validation pass between the step and the reading changes none of them."""
    found, precision = [], PrecisionConfig(dtype="fp32", recipe="mxfp8", cache_weights=True)
    log = LogConfig(progress=False, statistics_every=1)
    for every in (0, 1):
        evaluation = EvaluationConfig(every=every, batches=1)
        config = tiny_run(tmp_path, f"run{every}", steps=2, precision=precision, evaluation=evaluation, log=log)
        train(config)
        row = rows_of(config)[0]
        assert ("validation_loss" in row) == bool(every)
        found.append(row["quantization"])
    assert found[0] == found[1]
    assert {key.rpartition(".")[2] for key in found[0]} == {"input", "weight", "grad_output"}


def test_only_the_steps_that_are_due_pay_for_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four steps of two micro-batches, the second of steps 2 and 4; the numbers of the run are the same."""
    recorded = []

    def spy(*arguments: Any, **options: Any) -> None:
        recorded.append(arguments[1])
        record_statistics(*arguments, **options)

    for module in ("gemm.scaling", "module.weight_cache"):
        monkeypatch.setattr(f"te_models.layers.{module}.record_statistics", spy)
    curves = []
    for every in (0, 2):
        log = LogConfig(progress=False, histogram_interval=every)  # whose histograms are of these statistics
        precision = PrecisionConfig(dtype="fp32", recipe="current")
        run = tiny_run(tmp_path, f"run{every}", steps=4, model=ONE_LAYER, precision=precision, log=log)
        train(run)
        curves.append(curve(run))
    assert curves[0] == curves[1]
    assert len(recorded) == 2 * 4 * 3, "of four GEMMs, three roles"


@pytest.mark.slow
def test_one_graph_serves_the_steps_with_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the one of all other steps, and none is made when they are due again."""
    # what Dynamo makes, and not what Inductor makes of it, is counted here
    monkeypatch.setattr("te_models.training.step.backend_for", lambda model: "aot_eager")
    run = tiny_run(tmp_path, steps=4, compile=True, model=ONE_LAYER, precision=PrecisionConfig(recipe="current"))
    run = run.replace(log=LogConfig(progress=False, statistics_every=2), data=run.data.replace(validation_fraction=0.0))
    train(run)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    rows = rows_of(run)
    assert ["quantization" in row for row in rows] == [False, True, False, True]


def test_numbers_that_json_lacks_are_null() -> None:
    values = {"a": {"amax": float("inf"), "underflow": 0.5}, "b": {"amax": float("nan")}}
    assert finite(values) == {"a": {"amax": None, "underflow": 0.5}, "b": {"amax": None}}


def test_the_configuration_becomes_a_recipe() -> None:
    assert build_recipe(PrecisionConfig(), 4) is None
    options = PrecisionConfig(recipe="delayed", recipe_options=("amax_history_len=16", "fp8_format=E4M3"))
    recipe = build_recipe(options, 4)
    assert isinstance(recipe, DelayedScaling)
    assert (recipe.amax_history_len, recipe.fp8_format.name) == (16, "E4M3")
    for text, value in (("True", True), ("False", False), ("true", True), ("false", False)):
        options = PrecisionConfig(recipe="mxfp8", recipe_options=(f"enable_2d_quantization={text}",))
        assert build_recipe(options, 4) == MXFP8BlockScaling(enable_2d_quantization=value)
    ends = {"first_layers_bf16": 1, "last_layers_bf16": 1}
    chosen = build_recipe(PrecisionConfig(recipe="mxfp8", overrides=("*.experts.*=block",), **ends), 4)
    assert isinstance(chosen, PerModuleRecipe)
    assert chosen.for_module("decoder.layers.1.mlp.experts.linear_fc1") == Float8BlockScaling()
    assert chosen.for_module("decoder.layers.1.mlp.linear_fc1") == MXFP8BlockScaling()
    assert chosen.for_module("decoder.layers.3.mlp.linear_fc1") is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"overrides": ("*=bf16",)}, "precision.overrides is .* allowed: empty without a recipe"),
        ({"cache_weights": True}, "precision.cache_weights is True; allowed: false without a recipe"),
        ({"recipe": "mxfp8", "overrides": ("*.fc1",)}, "allowed: pattern=recipe"),
        ({"recipe": "mxfp8", "overrides": ("*.fc1=int8",)}, "allowed after the last '=': 'bf16' or the name of a rec"),
        ({"recipe": "mxfp8", "recipe_options": ("speed=1",)}, "precision.recipe_options: .* has no field 'speed'"),
        ({"recipe": "nvfp4", "recipe_options": ("disable_rht=no",)}, "disable_rht is 'no'; allowed: True or False"),
        ({"recipe": "mxfp8", "first_layers_bf16": 3, "last_layers_bf16": 2}, "is 5; allowed: at most the 4 layers"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_recipe(PrecisionConfig(**changes), 4)
