"""Quantization-aware training: an exported folder has exactly the weights that the last forward pass used."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.formats import WRITABLE
from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.checkpoints.tools.quantize import quantizer_named
from te_models.cli.main import main
from te_models.config import AttentionConfig, ConfigError
from te_models.model import GPTModel
from te_models.training import EvaluationConfig, LoRAConfig, ModelSource, PrecisionConfig, loop, train
from te_models.training.config.precision import RecipePhase
from te_models.training.precision import rounded_weight
from tests.training.processes import train_as_one_and_two
from tests.training.runs import curve, rows_of, tiny_model, tiny_run

FORMATS = ("current", "block", "mxfp8", "nvfp4", "mxfp4", "int4", "int8")
PLACES = [
    (qat, name)
    for qat in FORMATS
    for name, forms in WRITABLE.items()
    if ("mxfp4" in name) <= (qat == "mxfp4")  # whose storage has the fields of MXFP8
    and any(form.takes(quantizer_named(qat).with_usage(rowwise=True, columnwise=False)) for form in forms)
]
"""Each format with each export that takes its folder."""


ONE_LAYER = tiny_model(layers=1, hidden=128).replace(  # whose projections are whole blocks of 128 rows
    attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=128)
)


def qat_run(tmp_path: Path, qat: str, name: str = "run", **changes: Any) -> Any:
    precision = PrecisionConfig(dtype="bf16", qat=qat, qat_activations=changes.pop("activations", False))
    values = {"steps": 2, "precision": precision, "model": ModelSource(config=ONE_LAYER)}
    return tiny_run(tmp_path, name, **(values | {"evaluation": EvaluationConfig(batches=1)} | changes))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The parameters as the last validation pass saw them."""
    found: dict[str, torch.Tensor] = {}
    real = loop.evaluate_model

    def spy(model: GPTModel, *arguments: Any) -> float:
        found.update({name: p.detach().clone() for name, p in model.named_parameters()})
        return real(model, *arguments)

    monkeypatch.setattr(loop, "evaluate_model", spy)
    return found


@pytest.mark.parametrize("qat", [*(pytest.param(x, marks=pytest.mark.slow) for x in FORMATS[:3]), *FORMATS[3:]])
def test_exports_hold_the_weights_last_used(qat: str, tmp_path: Path, used: dict[str, torch.Tensor]) -> None:
    run = qat_run(tmp_path, qat)
    train(run)
    final, stored = Path(run.output_dir) / "final", tmp_path / "stored"
    latent = dict(GPTModel.from_pretrained(final, dtype=torch.bfloat16).named_parameters())
    assert main(["quantize", str(final), str(stored), "--recipe", qat]) == 0
    names = [name for form, name in PLACES if form == qat]
    assert names
    for name in names:
        exported, back = tmp_path / f"hf-{name}", tmp_path / f"back-{name}"
        assert main(["export", str(stored), str(exported), "--format", name]) == 0
        assert main(["import", str(exported), str(back), "--dequantize"]) == 0
        read = dict(GPTModel.from_pretrained(back, dtype=torch.bfloat16).named_parameters())
        assert read.keys() == used.keys()
        for parameter, value in read.items():
            assert torch.equal(value, used[parameter]), (name, parameter)
            assert torch.equal(value, latent[parameter]) != is_linear_weight(parameter), (name, parameter)


def test_gradients_go_straight_through(tmp_path: Path) -> None:
    """A step is that of the rounded weights, added to those that were rounded."""
    run = qat_run(tmp_path, "nvfp4", steps=1)
    train(run)
    plain = run.replace(output_dir=str(tmp_path / "plain"), precision=PrecisionConfig())
    train(plain)
    (ours,), (theirs,) = (rows_of(r) for r in (run, plain))
    assert ours["loss"] != theirs["loss"]
    first, second = (GPTModel.from_pretrained(Path(r.output_dir) / "final").state_dict() for r in (run, plain))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    update = (first[name].float() - second[name].float()).abs().max()
    assert 0 < update < 0.02, "a step of AdamW moves no weight farther than twice the learning rate"


@pytest.mark.slow
@pytest.mark.parametrize("qat", ["mxfp8", "nvfp4"])
def test_rounded_inputs_change_the_pass_as_the_recipe_does(qat: str, tmp_path: Path) -> None:
    losses = {}
    for activations in (False, True):
        run = qat_run(tmp_path, qat, f"run{activations}", activations=activations)
        train(run)
        losses[activations] = [row["loss"] for row in rows_of(run)]
    assert losses[False] != losses[True]


@pytest.mark.sentinels("fsdp2-True")
@pytest.mark.parametrize(("layout", "moe"), [("fsdp2", True), ("tp2", True), ("ep2", True), ("pp2", False)])
def test_ranks_round_what_one_rank_rounds(layout: str, moe: bool, tmp_path: Path) -> None:
    one = qat_run(tmp_path, "current", "one", model=ModelSource(config=tiny_model(moe=moe)))
    one = one.replace(precision=one.precision.replace(dtype="fp32"))
    for ours, theirs in zip(curve(train_as_one_and_two(one, tmp_path, layout)), curve(one), strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


def test_experts_have_scales_of_their_own() -> None:
    stack = torch.randn(3, 32, 64) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    for name in FORMATS:
        apart = torch.stack([rounded_weight(matrix, quantizer_named(name)) for matrix in stack])
        assert torch.equal(rounded_weight(stack, quantizer_named(name)), apart), name


def test_what_is_rounded_is_what_a_folder_stores_quantized() -> None:
    names = expected_tensors(tiny_model(moe=True), "grouped")
    kinds = {name.rpartition(".")[0].rpartition(".")[2] for name in filter(is_linear_weight, names)}
    assert kinds == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision.recipe is 'mxfp8'; allowed: 'none' with precision.qat = 'nvfp4'"):
        PrecisionConfig(recipe="mxfp8", qat="nvfp4")
    later = (RecipePhase(from_step=2, recipe="mxfp8"),)
    with pytest.raises(ConfigError, match=r"precision.schedule is \['mxfp8'\]; allowed: recipes 'none' with"):
        PrecisionConfig(schedule=later, qat="nvfp4")
    with pytest.raises(ConfigError, match=r"precision.qat_activations is True; allowed: false, except"):
        PrecisionConfig(qat="int4", qat_activations=True)
    with pytest.raises(ConfigError, match=r"precision.qat is 'int4'; allowed: 'none' with lora.rank"):
        qat_run(tmp_path, "int4", lora=LoRAConfig(rank=2))
