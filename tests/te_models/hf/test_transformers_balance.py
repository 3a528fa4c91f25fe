"""Balance of experts by their bias in training with transformers' Trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compare import refused

pytest.importorskip("transformers", reason="TEModelForCausalLM is a transformers model")
import transformers

from te_models.hf import ExpertBiasCallback, TEConfig, TEModelForCausalLM
from te_models.model.moe.expert_bias import biases_and_counts
from tests.build import VARIANTS, tiny, token_ids

RATE = 0.01


def build(config: Any = VARIANTS["moe_sigmoid_groups"]) -> TEModelForCausalLM:
    torch.manual_seed(0)
    return TEModelForCausalLM(TEConfig(config=config.to_dict()))


def trainer(model: TEModelForCausalLM, folder: Path, **options: Any) -> transformers.Trainer:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it: pip install 'te_models[trainer]'")
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(24, 9)]
    settings: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": []}
    settings |= {"gradient_accumulation_steps": 2, "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-3}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "seed": 1}
    arguments = transformers.TrainingArguments(str(folder), **(settings | options))
    callbacks = [ExpertBiasCallback(RATE)]
    return transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)


def state(model: TEModelForCausalLM) -> tuple[Tensor, Tensor]:
    """The biases, and what was counted since they moved."""
    biases, counts = zip(*biases_and_counts(model), strict=True)
    return torch.stack(biases), torch.stack(counts)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_step_of_trainer_moves_the_biases_once(recompute: bool, tmp_path: Path) -> None:
    known = transformers.TrainingArguments.__dataclass_fields__
    option = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    model = build()
    trainer(model, tmp_path, **{option: recompute}).train()
    biases, counts = state(model)
    steps = biases / RATE
    assert torch.allclose(steps, steps.round(), atol=1e-4) and 2 <= steps.abs().max() <= 4
    assert not counts.any()
    again = build()
    trainer(again, tmp_path, **{option: recompute}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(state(again)[0], biases)
    assert torch.equal(state(TEModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4"))[0], biases)


def test_a_step_that_the_gradient_scaler_skips_moves_nothing() -> None:
    model, ids = build(), token_ids(2, 9)
    for skipped in (True, False):
        model(ids, labels=ids).loss.backward()
        assert state(model)[1].sum() == 72
        optimizer = SimpleNamespace(step_was_skipped=skipped)
        ExpertBiasCallback(RATE).on_optimizer_step(None, None, None, model=model, optimizer=optimizer)
        assert bool(state(model)[0].any()) != skipped and not state(model)[1].any()


def test_what_cannot_be_balanced_is_refused_before_the_first_step(tmp_path: Path) -> None:
    refused(lambda: ExpertBiasCallback(-1), "rate is -1; allowed: zero or a positive number")
    refused(lambda: trainer(build(tiny()), tmp_path).train(), "model has no expert bias")
