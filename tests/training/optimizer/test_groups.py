"""Which parameters are trained and how: globs, freezing, Muon, averages, spikes; it all resumes or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.config import ConfigError
from te_models.layers import Linear, MXFP8BlockScaling, quantized_model_init
from te_models.training import OptimizerConfig, PrecisionConfig, ScheduleConfig, TrainConfig, train
from te_models.training.build import build_model, build_optimizer
from te_models.training.optimizer.adamw import SPIKE_AFTER, Optimizer
from te_models.training.optimizer.groups import optimizer_groups
from te_models.training.optimizer.muon import Muon, newton_schulz
from tests.training.runs import assert_same_bits, curve, rows_of, tensors_under, tiny_model, tiny_run


def optimizer_config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.1, **changes})


def test_multipliers_are_those_of_the_first_match() -> None:
    model = GPTModel(tiny_model(), dtype=torch.float32)
    config = optimizer_config(lr_mult=("embedding.*=0.5", "*=2"), wd_mult=("*norm*=1", "decoder.*=0.25"))
    groups = optimizer_groups(config, dict(model.named_parameters()))
    found = {id(p): (rate, decay) for (_, rate, decay), members in groups.items() for p in members}
    for name, p in model.named_parameters():
        rate = 0.5 if name.startswith("embedding.") else 2.0
        decay = 0.1 if "norm" in name else 0.1 * 0.25 if name.startswith("decoder.") else 0.1 * (p.dim() > 1)
        assert found[id(p)] == (rate, decay), name


def test_a_multiplier_is_another_learning_rate() -> None:
    start = torch.randn(3, 4)
    weights = {"a": torch.nn.Parameter(start.clone()), "b": torch.nn.Parameter(start.clone())}
    optimizer = Optimizer(weights.items(), optimizer_config(lr_mult=("a=0.5",)))
    other = torch.nn.Parameter(start.clone())
    reference = Optimizer([("a", other)], optimizer_config())
    for p in (*weights.values(), other):
        p.grad = torch.ones(3, 4)
    optimizer.step(0.5)
    reference.step(0.25)
    assert torch.equal(weights["a"], other) and not torch.equal(weights["b"], other)


WRONG = {
    "lr_mult": ("x", "optimizer.lr_mult is 'x'; allowed: \"pattern=number\" with zero or a positive number"),
    "wd_mult": ("x=-1", "optimizer.wd_mult is 'x=-1'"),
    "ema_decay": (1.0, "optimizer.ema_decay is 1.0; allowed: a number between 0 and 1"),
    "skip_grad_norm_spike": (1.0, "optimizer.skip_grad_norm_spike is 1.0; allowed: a number above 1"),
    "muon_momentum": (1.0, "optimizer.muon_momentum is 1.0"),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_are_named(key: str) -> None:
    value, says = WRONG[key]
    with pytest.raises(ConfigError, match=says):
        OptimizerConfig(**{key: (value,) if isinstance(value, str) else value})


@pytest.mark.parametrize("key", ["lr_mult", "wd_mult", "freeze"])
def test_a_pattern_that_matches_nothing_is_refused(key: str, tmp_path: Path) -> None:
    value = "embeding.*" + ("" if key == "freeze" else "=1")
    run = tiny_run(tmp_path, optimizer=optimizer_config(**{key: (value,)}))
    with pytest.raises(ConfigError, match=rf"optimizer.{key} has 'embeding.\*', which matches no parameter; they are"):
        build_optimizer(run, build_model(run, "cpu", None))
    run = tiny_run(tmp_path, optimizer=optimizer_config(freeze=("*",)))
    with pytest.raises(ConfigError, match="patterns that leave something to train"):
        build_optimizer(run, build_model(run, "cpu", None))


def test_muon_is_torch_s_on_matrices() -> None:
    """To the last bit of float32, and on a stack member by member."""
    for shape in ((8, 6), (6, 20)):
        ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
        reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer = Muon([ours], lr=torch.tensor(0.02))
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            optimizer.step()
            reference.step()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)
    stack = torch.randn(3, 16, 24)
    members = torch.stack([newton_schulz(member) for member in stack])
    torch.testing.assert_close(newton_schulz(stack), members, rtol=0, atol=2e-2)
    values = torch.linalg.svdvals(newton_schulz(stack).float())
    assert values.min() > 0.6 and values.max() < 1.3
    with pytest.raises(ValueError, match=r"Muon got a parameter that is of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(1.0))


@pytest.mark.parametrize("split", ["projections", "none"])
def test_muon_takes_joined_projections_one_by_one(split: str, tmp_path: Path) -> None:
    """A step on a weight that joins matrices is torch's on each of them, by itself."""
    run = tiny_run(tmp_path, moe=True, optimizer=OptimizerConfig(kind="muon", muon_split=split))
    model = build_model(run, "cpu", None)
    a, f = model.config.attention, model.config.moe.moe_ffn_hidden_size
    keys = a.num_query_groups * a.key_channels
    joined = {"mlp.experts.linear_fc1.weight": (f, f)}
    joined["self_attention.linear_qkv.weight"] = (a.num_attention_heads * a.key_channels, keys, keys)
    optimizer = build_optimizer(run, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step(0.02)
    for end, rows in joined.items():
        name = f"decoder.layers.0.{end}"
        p = optimizer.parameters[name]
        for place in range(p.shape[0] if p.dim() == 3 else 1):
            old, grad, new = (x[place] if p.dim() == 3 else x for x in (before[name], p.grad, p.detach()))
            parts = [x.split(list(rows)) if split == "projections" else [x] for x in (old, grad, new)]
            for theirs, its_grad, ours in zip(*parts, strict=True):
                reference = torch.nn.Parameter(theirs.clone())
                reference.grad = its_grad.clone()
                options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
                torch.optim.Muon([reference], **options).step()
                torch.testing.assert_close(ours, reference.detach(), rtol=0, atol=2e-4)


def run_of(tmp_path: Path, name: str, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {"lr": 3e-3, "ema_decay": 0.8, "skip_grad_norm_spike": 3.0, **changes}
    run = tiny_run(tmp_path, name, moe=True, steps=4, precision=PrecisionConfig(dtype="bf16"))
    return run.replace(schedule=ScheduleConfig(kind="inverse_sqrt"), optimizer=OptimizerConfig(**options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    changes = {"kind": kind, "freeze": ("embedding.*",), "lr_mult": ("*experts*=0.5",), "master_weights": True}
    whole, parts = run_of(tmp_path, "whole", **changes), run_of(tmp_path, "parts", **changes)
    train(whole)
    train(parts.replace(steps=2))
    train(parts)
    assert [row[:-1] for row in curve(whole)] == [row[:-1] for row in curve(parts)]
    folders = [Path(run.output_dir) for run in (whole, parts)]
    assert_same_bits(*(tensors_under(folder / "checkpoints") for folder in folders))
    trained, average = (GPTModel.from_pretrained(folders[0] / name, dtype="float32") for name in ("final", "final-ema"))
    assert tensors_under(folders[0] / "final-ema").popitem()[1].dtype == torch.float32
    first = build_model(whole, "cpu", None)
    for name, p in trained.named_parameters():
        same = torch.equal(p, dict(average.named_parameters())[name])
        assert same == name.startswith("embedding."), name
        assert torch.equal(p.bfloat16(), dict(first.named_parameters())[name]) == name.startswith("embedding."), name


def test_the_average_is_its_formula() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = Optimizer([("p", p)], optimizer_config(ema_decay=0.9))
    expected = torch.zeros(2, 2)
    for i in range(3):
        p.grad = torch.full((2, 2), float(i + 1), dtype=torch.bfloat16)
        optimizer.step(0.1)
        expected = 0.9 * expected + 0.1 * p.detach().float()
    torch.testing.assert_close(optimizer.averages["p"], expected)
    before = optimizer.averages["p"].clone()
    optimizer.step(0.1, noop=torch.tensor(True))
    assert torch.equal(optimizer.averages["p"], before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_average_is_of_the_master_and_not_of_the_rounded_weight(kind: str) -> None:
    """Steps that are too small for the weight's bits move the master, and with it the average."""
    p = torch.nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    config = optimizer_config(kind=kind, ema_decay=0.5, master_weights=True, weight_decay=0.0)
    name = "decoder.layers.0.mlp.linear_fc1.weight"  # Muon's are matrices of layers
    optimizer = Optimizer([(name, p)], config)
    expected = torch.full((4, 4), 256.0)
    for _ in range(3):
        p.grad = torch.eye(4, dtype=torch.bfloat16)
        optimizer.step(1e-3)
        expected = expected.lerp(optimizer.masters[name], 0.5)
    assert torch.equal(p, torch.full_like(p, 256.0)) and not torch.equal(optimizer.masters[name], p.float())
    assert torch.equal(optimizer.averages[name], expected) and not torch.equal(expected, p.float())


def test_the_average_begins_as_the_master() -> None:
    """A quantized weight that keeps the values which it was made of: its master has them, its own are others."""
    with quantized_model_init(recipe=MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        layer = Linear(64, 64, bias=False, params_dtype=torch.bfloat16)
    optimizer = Optimizer([("weight", layer.weight)], optimizer_config(ema_decay=0.5))
    assert torch.equal(optimizer.averages["weight"], optimizer.masters["weight"])
    assert not torch.equal(optimizer.averages["weight"], layer.weight.dequantize().float())


def test_a_spike_is_skipped_and_a_lasting_level_is_accepted() -> None:
    optimizer = Optimizer([("p", torch.nn.Parameter(torch.zeros(2)))], optimizer_config(skip_grad_norm_spike=2.0))

    def skipped(norm: float) -> bool:
        found = optimizer.skips(torch.tensor(norm))
        assert found is not None
        return bool(found)

    assert not any(skipped(norm) for norm in (100.0, *[1.0] * 3))  # too early to tell
    optimizer = Optimizer([("p", torch.nn.Parameter(torch.zeros(2)))], optimizer_config(skip_grad_norm_spike=2.0))
    assert not any(skipped(1.0) for _ in range(SPIKE_AFTER))
    assert skipped(2.5) and not skipped(1.9)
    assert not skipped(float("inf")), "an infinite norm is the affair of skip_nonfinite"
    steps = [skipped(3.0) for _ in range(60)]
    assert steps[0] and not steps[-1]


def test_a_skipped_spike_is_in_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.training.optimizer.adamw.SPIKE_AFTER", 1)
    run = tiny_run(tmp_path, steps=3, optimizer=OptimizerConfig(lr=3e-3, skip_grad_norm_spike=1.0001))
    clip = Optimizer.clip_gradients
    norms = iter([1.0, 5.0, 1.0])
    monkeypatch.setattr(Optimizer, "clip_gradients", lambda self: clip(self) * 0 + next(norms))
    train(run)
    rows = rows_of(run)
    assert [row.get("skipped", False) for row in rows] == [False, True, False]
    assert rows[1]["grad_norm"] == 5.0


@pytest.mark.parametrize("options", [{"kind": "muon"}, {"ema_decay": 0.9}], ids=str)
def test_stored_weights_that_cannot_have_it_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    run = tiny_run(tmp_path, moe=True, optimizer=optimizer_config(**options))
    with pytest.raises(ConfigError, match=r"allowed with precision.quantized_weights: its default"):
        run.replace(precision=PrecisionConfig(recipe="mxfp8", quantized_weights=True))
