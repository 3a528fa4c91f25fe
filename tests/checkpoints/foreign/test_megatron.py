"""Checkpoints that Megatron-Core itself wrote, on one rank and on two, give its logits; it loads what we export."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, MoEConfig
from te_models.checkpoints import export_checkpoint, import_checkpoint
from tests.checkpoints.foreign.megatron_ranks import EXPERTS, LENGTH, SIZES, VOCABULARY
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)


PARAMS = ("dense 2", "dense 1", "moe 1")
"""Model, and number of ranks of tensor parallelism."""


def config_of(kind: str) -> ModelConfig:
    moe = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=EXPERTS["moe_ffn_hidden_size"])
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=SIZES["hidden_size"],
        num_layers=SIZES["num_layers"],
        max_position_embeddings=64,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
        mlp=MLPConfig(ffn_hidden_size=SIZES["ffn_hidden_size"]),
        moe=moe if kind == "moe" else None,
    )


@pytest.fixture(
    scope="module", params=[pytest.param(p, marks=pytest.mark.slow if p != "dense 2" else ()) for p in PARAMS]
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind, tp = request.param.split()
    folder = tmp_path_factory.mktemp("megatron")
    arguments = ["-m", "tests.checkpoints.foreign.megatron_ranks", str(folder), kind, tp]
    run_on_ranks(arguments, ranks=int(tp), timeout=120, fresh=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind).to_dict()))
    return kind, folder


def assert_same_logits(model: GPTModel, folder: Path) -> None:
    expected = torch.load(folder / "logits.pt", weights_only=True)
    with torch.no_grad():
        found = model(torch.arange(3, 3 + LENGTH)[None]).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_a_distributed_checkpoint_gives_its_logits(written: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = written
    import_checkpoint(folder / "saved", tmp_path / "model", config=folder / "config.json")
    assert_same_logits(GPTModel.from_pretrained(tmp_path / "model"), folder)


def test_the_files_of_ranks_give_its_logits(written: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = written
    import_checkpoint(folder / "legacy", tmp_path / "model", config=folder / "config.json")
    assert_same_logits(GPTModel.from_pretrained(tmp_path / "model"), folder)


def test_megatron_loads_the_files_of_ranks(written: tuple[str, Path], tmp_path: Path) -> None:
    """What it saved, by way of our folder, on the other number of ranks."""
    kind, folder = written
    import_checkpoint(folder / "saved", tmp_path / "model", config=folder / "config.json")
    tp = 1 if kind == "moe" or (folder / "legacy" / "mp_rank_01").exists() else 2
    options = {"make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": tp}
    export_checkpoint(tmp_path / "model", tmp_path / "ranks", to="megatron", local_modules=True, **options)
    release = tmp_path / "ranks" / "release"
    arguments = ["-m", "tests.checkpoints.foreign.megatron_ranks", str(tmp_path), kind, str(tp), str(release)]
    run_on_ranks(arguments, ranks=tp, timeout=120, fresh=True)
    found, expected = (torch.load(f / "logits.pt", weights_only=True) for f in (release, folder))
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
