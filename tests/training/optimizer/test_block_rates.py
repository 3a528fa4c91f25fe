"""Learning rates of the matrices that a weight joins: a step is that of the matrices as parameters of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.blocks import joined_blocks
from te_models.config import ConfigError
from te_models.training import ModelSource, OptimizerConfig, ScheduleConfig, train
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.trained import blocks_of
from tests.build import VARIANTS, heads
from tests.training.processes import train_as_one_and_two
from tests.training.runs import balanced_model, curve, tiny_model, tiny_run

ROWS = {"q": 8, "k": 4, "v": 4}
RATES = {"q": 1.0, "k": 0.5, "v": 0.0}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_matrices_apart(kind: str, dtype: torch.dtype) -> None:
    whole = torch.nn.Parameter(torch.randn(16, 12).to(dtype))
    apart = {name: torch.nn.Parameter(part.clone()) for name, part in _parts(whole.detach()).items()}
    options: dict[str, Any] = {"kind": kind, "master_weights": True, "clip_grad_norm": None}
    config = OptimizerConfig(lr_mult=("*.weight.k=0.5", "*.v=0"), **options)
    ours = Optimizer([("linear_qkv.weight", whole)], config, blocks={"linear_qkv.weight": ROWS})
    table = tuple(f"{name}={RATES[name]}" for name in apart)
    theirs = Optimizer(apart.items(), OptimizerConfig(lr_mult=table, **options))
    for step in range(4):
        torch.manual_seed(step)
        whole.grad = torch.randn(16, 12).to(dtype)
        for name, part in _parts(whole.grad).items():
            apart[name].grad = part.clone()
        ours.step(0.01, noop=torch.tensor(step == 2))
        theirs.step(0.01, noop=torch.tensor(step == 2))
    for name, part in _parts(ours.masters.get("linear_qkv.weight", whole.detach())).items():
        torch.testing.assert_close(part, theirs.masters.get(name, apart[name].detach()), rtol=1e-6, atol=1e-7)
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for name, part in _parts(whole.detach()).items():
        torch.testing.assert_close(part, apart[name].detach(), rtol=rtol, atol=1e-7)


def _parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(ROWS, weight.split(list(ROWS.values())), strict=True))


def test_the_first_pattern_that_means_a_block_or_its_weight_wins() -> None:
    def shares(*lr_mult: str) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(16, 12))
        weight.grad = torch.ones(16, 12)
        config = OptimizerConfig(lr_mult=lr_mult, weight_decay=0.0, clip_grad_norm=None)
        Optimizer([("linear_qkv.weight", weight)], config, blocks={"linear_qkv.weight": ROWS}).step(0.01)
        return [round(float(part[0, 0]) / -0.01, 3) for part in _parts(weight.detach()).values()]

    assert shares("*.k=0.5", "*=2") == [2.0, 0.5, 2.0] and shares("*=2", "*.k=0.5") == [2.0, 2.0, 2.0]
    assert shares("linear_qkv.weight=3") == [3.0, 3.0, 3.0]
    assert shares("*.q=2", "*.k=2", "*.v=2") == [2.0, 2.0, 2.0]


def test_blocks_are_named_and_cover_what_they_join() -> None:
    model = tiny_model()
    blocks = blocks_of(model, "grouped")
    assert blocks["decoder.layers.0.self_attention.linear_qkv.weight"] == {"q": 64, "k": 32, "v": 32}
    assert blocks["decoder.layers.1.mlp.linear_fc1.weight"] == {"gate": 128, "up": 128}
    assert not any(name.endswith(("linear_proj.weight", "linear_fc2.weight", "embeddings.weight")) for name in blocks)
    latent = blocks_of(balanced_model(), "grouped")
    assert latent["decoder.layers.0.self_attention.linear_qkv_down.weight"] == {"q": 12, "kv": 14}
    assert latent["decoder.layers.1.mlp.experts.linear_fc1.weight"] == {"gate": 16, "up": 16}
    gated = model.replace(attention=heads(None, output_gate=True))
    gated_blocks = blocks_of(gated, "grouped")["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert list(gated_blocks) == ["q", "k", "v", "gate"]
    compressed = blocks_of(VARIANTS["compressed"], "grouped")
    assert compressed["decoder.layers.1.self_attention.linear_qkv_down.weight"] == {"q": 20, "kv": 16}
    assert list(compressed["decoder.layers.0.self_attention.compressor.linear_in.weight"]) == ["kv", "gate"]
    for model in VARIANTS.values():
        for name, shape in expected_tensors(model).items():
            if len(shape) > 1:
                assert sum(tuple(joined_blocks(model, name, shape).values()) or (shape[-2],)) == shape[-2]


@pytest.mark.sentinels("adamw-fsdp2")
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "ep2"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_ranks_do_what_one_rank_does(kind: str, layout: str, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(kind=kind, lr=3e-3, lr_mult=("*.linear_qkv.weight.k=0.1", "*.linear_fc1.weight.up=3"))
    source = ModelSource(config=tiny_model(moe=True))
    one = tiny_run(tmp_path, "one", steps=4, optimizer=optimizer, model=source)
    for ours, theirs in zip(curve(train_as_one_and_two(one, tmp_path, layout)), curve(one), strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr_mult has '\*.linear_qkv.weight.w', which"):
        train(tiny_run(tmp_path, optimizer=OptimizerConfig(lr_mult=("*.linear_qkv.weight.w=0.1",))))
    free = OptimizerConfig(kind="schedule_free", lr_mult=("*.linear_qkv.weight.k=0.1",))
    with pytest.raises(ConfigError, match=r"has several rates for .* allowed with optimizer.kind = 'schedule_free'"):
        train(tiny_run(tmp_path, optimizer=free, schedule=ScheduleConfig(kind="constant")))
