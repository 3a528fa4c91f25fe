"""Runs that balance experts by their bias: it works, it continues bit for bit, and ranks change nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, training
from te_models.config import ConfigError
from tests.training.child import run_until_killed
from tests.training.edited import edit_values, make_version_1
from tests.training.ranks.test_expert_ranks import train_and_resume
from tests.training.runs import assert_same_bits, balanced_model, curve, rows_of, tensors_under, tiny_run

RATE = "moe_router_bias_update_rate"


def run_of(tmp_path: Path, name: str, rate: float, *, accumulation: int = 2, **changes: Any) -> training.TrainConfig:
    optimizer = training.OptimizerConfig(lr=1e-3, moe_router_bias_update_rate=rate, **changes.pop("optimizer", {}))
    values = {"model": training.ModelSource(config=balanced_model()), "steps": 4} | changes
    config = tiny_run(tmp_path, name, optimizer=optimizer, **values)
    return config.replace(data=config.data.replace(gradient_accumulation=accumulation))


def loads(config: training.TrainConfig) -> list[float]:
    return [row["max_expert_load"] for row in rows_of(config)]


def biases(folder: Path) -> list[torch.Tensor]:
    return [t for name, t in tensors_under(folder).items() if name.endswith("router.expert_bias")]


def save_unbalanced(folder: Path) -> None:
    """A model whose tokens have a direction in common, which two experts of one group look for."""
    torch.manual_seed(0)
    model = GPTModel(balanced_model())
    with torch.no_grad():
        common = 0.05 * torch.randn(32)
        model.embedding.word_embeddings.weight.add_(common)
        for layer in model.decoder.layers[1:]:
            layer.mlp.router.weight[:2] += common / 2
    model.save_pretrained(folder)


@pytest.mark.slow
def test_experts_of_an_unbalanced_router_share_the_tokens(tmp_path: Path) -> None:
    """Without the bias two of eight experts have, and keep, every token, four times the mean; the loss is the same."""
    save_unbalanced(tmp_path / "start")
    runs = []
    for rate in (0.0, 0.005):
        changes = {"model": training.ModelSource(path=str(tmp_path / "start"))}
        changes["checkpoint"] = training.CheckpointConfig(every=0)
        config = run_of(tmp_path, f"{rate}", rate, steps=200, accumulation=1, **changes)
        config = config.replace(data=config.data.replace(micro_batch_size=4))
        runs.append((training.train(config), sum(loads(config)[-20:]) / 20, loads(config)[0]))
    (plain, before, first), (balanced, after, _) = runs
    assert first > 3.9 and before > 3.9 and after < 2.8
    assert balanced.loss == pytest.approx(plain.loss, rel=0.01)


@pytest.mark.slow
def test_a_run_continues_with_its_biases(tmp_path: Path) -> None:
    config = run_of(tmp_path, "run", 0.01, evaluation=training.EvaluationConfig(every=1, batches=1))
    training.train(config)
    again = config.replace(output_dir=str(tmp_path / "again"))
    run_until_killed(again, "step", 3)
    training.train(again)
    assert curve(again) == curve(config) and loads(again) == loads(config)
    one, two = Path(config.output_dir), Path(again.output_dir)
    assert_same_bits(tensors_under(two / "final"), tensors_under(one / "final"))
    found = biases(one / "final")
    assert len(found) == 2 and all(bias.dtype is torch.float32 and bias.any() for bias in found)
    # whole multiples of the rate: each step moved them once, and no evaluation did
    steps = torch.stack(found) / 0.01
    assert torch.allclose(steps, steps.round(), atol=1e-4) and steps.abs().max() <= 4


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
def test_distributed_experts_are_balanced_as_on_one_rank(tmp_path: Path) -> None:
    """And continue bit for bit, from biases that moved."""
    alone = run_of(tmp_path, "alone", 0.01, accumulation=2, steps=3)
    training.train(alone)
    together = run_of(tmp_path, "together", 0.01, accumulation=1, steps=3)
    train_and_resume(together, 2, tmp_path)
    assert loads(together) == loads(alone)
    expected, got = (biases(Path(run.output_dir) / "final") for run in (alone, together))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(expected, got, strict=True))


@pytest.mark.slow
def test_activation_checkpointing_counts_once(tmp_path: Path) -> None:
    plain = run_of(tmp_path, "plain", 0.01)
    again = run_of(tmp_path, "again", 0.01, model=plain.model.replace(activation_checkpointing=True))
    for config in (plain, again):
        training.train(config)
    assert loads(again) == loads(plain)
    assert_same_bits(tensors_under(Path(again.output_dir) / "final"), tensors_under(Path(plain.output_dir) / "final"))


def test_a_skipped_step_moves_no_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts go: the next step moves by its own."""
    config = run_of(tmp_path, "run", 0.01, steps=2, optimizer={"skip_nonfinite": True})

    def step(loss_function: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        weight = next(iter(optimizer.parameters.values()))
        broken = weight.register_hook(lambda grad: grad * float("inf")) if kwargs["step"] == 1 else None
        result = real(loss_function, optimizer, *args, **kwargs)
        if broken is not None:
            broken.remove()
        return result

    def update(model: Any, counts: torch.Tensor, rate: float) -> None:
        real_update(model, counts, rate)
        biases = [layer.mlp.router.expert_bias.clone() for layer in model.decoder.layers[1:]]
        seen.append((rate, counts.sum(-1).tolist(), biases))

    real, real_update, seen = training.loop.train_step, training.loop.move_expert_bias, []
    monkeypatch.setattr(training.loop, "train_step", step)
    monkeypatch.setattr(training.loop, "move_expert_bias", update)
    training.train(config)
    rows = rows_of(config)
    assert [row.get("skipped", False) for row in rows] == [True, False]
    (first, tokens, still), (second, again, moved) = seen
    assert (first, second) == (0.0, 0.01) and tokens == again == [2 * 2 * 32 * 2] * 2
    assert not any(bias.any() for bias in still) and all(bias.any() for bias in moved)


def test_the_rate_is_checked_and_part_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{RATE} is -0.001; allowed: zero or a positive number"):
        training.OptimizerConfig(moe_router_bias_update_rate=-1e-3)
    config = run_of(tmp_path, "run", 0.01, steps=2)
    training.train(config)
    with pytest.raises(ConfigError, match=f"cannot continue from step 2: optimizer.{RATE} differ"):
        training.train(run_of(tmp_path, "run", 0.02))
    # a checkpoint of before there was a rate, which is one without a manifest
    checkpoint = training.latest_checkpoint(Path(config.output_dir))
    make_version_1(checkpoint)
    edit_values(checkpoint, lambda values: values["config"]["optimizer"].pop(RATE))
    with pytest.warns(UserWarning, match="is a checkpoint of an earlier release"):
        assert training.train(run_of(tmp_path, "run", 0.02, schedule=training.ScheduleConfig(extend="hold"))).step == 4


def test_the_load_of_every_layer_of_experts_is_in_the_metrics(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, moe=True, steps=2)
    limited = config.model.config.replace(moe=config.model.config.moe.replace(moe_expert_capacity_factor=0.5))
    training.train(config.replace(model=training.ModelSource(config=limited)))
    for row in rows_of(config):
        experts = row["experts"]
        assert all(1 <= load <= 4 for load in experts["max_load"]) and row["max_expert_load"] == max(
            experts["max_load"]
        )
        assert all(0 < entropy <= math.log(4) + 1e-9 for entropy in experts["entropy"])
        choices = row["tokens"] / row["step"] * 2
        assert len(experts["dropped_tokens"]) == 2 and all(
            choices / 2 <= n < choices for n in experts["dropped_tokens"]
        )
    dense = tiny_run(tmp_path, "dense", steps=1)
    training.train(dense)
    assert not {"max_expert_load", "experts"} & rows_of(dense)[0].keys()
