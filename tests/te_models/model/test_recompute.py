"""Modules that are recomputed, and operations whose results are saved, change no bit of a gradient."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.config import ConfigError
from te_models.layers import DelayedScaling, MXFP8BlockScaling, autocast
from te_models.model import recompute
from te_models.model.recompute import matching_modules, operations, recompute_modules, save_results
from te_models.parallel import ParallelDims
from te_models.training import ModelSource, train
from te_models.training.preflight import check_model
from tests.compare import Operations
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_model, tiny_run

CHOICES: dict[str, Callable[[GPTModel], object]] = {
    "mlp": lambda m: recompute_modules(m, matching_modules(m, ["decoder.layers.*.mlp"])),
    "attention of one layer": lambda m: recompute_modules(m, ["decoder.layers.1.self_attention"]),
    "layers": lambda m: recompute_modules(m, matching_modules(m, ["decoder.layers.?"])),
    "gemms saved": lambda m: recompute_modules(m, matching_modules(m, ["decoder.layers.?"]), ["gemm"]),
    "attention saved": lambda m: (setattr(m, "activation_checkpointing", True), save_results(m, ["attention"])),
}
RECIPES = {"none": None, "mxfp8": MXFP8BlockScaling(), "delayed": DelayedScaling(amax_history_len=2)}


def gradients(moe: bool, recipe: str, choose: Callable[[GPTModel], object] | None) -> tuple[dict, int]:
    torch.manual_seed(0)
    model = GPTModel(tiny_model(moe=moe)).train()
    if choose is not None:
        choose(model)
    ids = torch.randint(0, 257, (2, 16))
    with Operations() as operations:
        for _ in range(2):  # the second pass has scales of the first
            with autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
                loss = model(ids, labels=ids, return_logits=False).loss
            loss.backward()
    products = sum("mm" in op._opname for op in operations.found)
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}, products


@pytest.mark.parametrize("recipe", ["none", "delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("moe", [False, True])
def test_gradients_are_the_same(moe: bool, recipe: str) -> None:
    right, plain = gradients(moe, recipe, None)
    counts = {}
    for name, choose in CHOICES.items():
        found, counts[name] = gradients(moe, recipe, choose)
        assert_same_bits(found, right)
    if recipe == "none" and not moe:
        assert counts["gemms saved"] == plain < counts["mlp"] < counts["layers"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute_modules": ("*",), "activation_checkpointing": True},
            "recompute_modules is .*none with activation",
        ),
        ({"recompute_save_ops": ("gemm",)}, "recompute_save_ops is .*none without recompute_modules"),
    ],
)
def test_options_that_exclude_each_other(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSource(config=tiny_model(), **options)


def test_names_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match=r"recompute_modules has 'decoder.layer.\*', which no module"):
        matching_modules(GPTModel(tiny_model(), device="meta"), ["decoder.layer.*"])
    for name in ("aten.mmm", "mm", "gem", "aten.mm.other"):
        with pytest.raises(ValueError, match=f"recompute_save_ops has '{name}', which is no operation of torch"):
            operations([name])
    assert operations(["aten.mm.default"]) == [torch.ops.aten.mm.default]
    assert matching_modules(GPTModel(tiny_model(), device="meta"), ["decoder.layers.0", "decoder.layers.0.*"]) == [
        "decoder.layers.0"
    ]


def test_a_run_has_the_same_bits(tmp_path: Path) -> None:
    run, some = (tiny_run(tmp_path, name, moe=True, steps=2) for name in ("run", "some"))
    options = {"recompute_modules": ("decoder.layers.*.mlp",), "recompute_save_ops": ("gemm", "all_to_all")}
    some = some.replace(model=some.model.replace(**options))
    for config in (run, some):
        train(config)
    assert curve(run) == curve(some)
    assert_same_bits(*(tensors_under(Path(config.output_dir) / "final") for config in (run, some)))
    wrong = some.replace(model=some.model.replace(recompute_modules=("x",)), output_dir=str(tmp_path / "wrong"))
    with pytest.raises(ConfigError, match="has 'x', which no module"):
        train(wrong)


def test_offloading_is_for_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is refused. Where the CPU counts as a device, tensors go and come, and change nothing."""
    run, away = (tiny_run(tmp_path, name, steps=2) for name in ("run", "away"))
    away = away.replace(model=away.model.replace(activation_offloading=True))
    with pytest.raises(ConfigError, match=r"activation_offloading is True; allowed on cpu: False"):
        check_model(away, tiny_model(), "cpu", ParallelDims(ranks=1))
    with pytest.raises(ConfigError, match=r"activation_offloading is True; allowed: False with a graph"):
        away.replace(compile=True)
    moved = []
    monkeypatch.setattr(recompute, "OFFLOADED", ("cpu",))
    monkeypatch.setattr(recompute, "LEAST", 1024)
    plain = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **o: (moved.append(o.get("non_blocking")), plain(*a, **o))[1])
    for config in (run, away):
        train(config)
    assert any(moved) and curve(run) == curve(away)
