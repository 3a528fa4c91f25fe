"""Models in products of layouts are saved as one rank saves them, on four ranks."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from te_models import GPTModel, ModelConfig
from te_models.checkpoints import expected_tensors
from te_models.layers import recipe
from te_models.model.parallel import process_groups
from te_models.parallel import ParallelDims, parallelize
from te_models.parallel.sharding import shards_experts_apart
from tests.build import tiny, tiny_moe
from tests.ranks import on_ranks
from tests.te_models.ranks.test_sharded_saving import CONFIGS
from tests.te_models.ranks.test_split_model import LARGE, SLACK, grown

RANKS = 4
CASES: dict[str, dict[str, int]] = {
    "ep2-fsdp4": {"expert_model_parallel_size": 2, "data_parallel_shard_size": 4},
    "ep2-hsdp": {"expert_model_parallel_size": 2, "data_parallel_shard_size": 2},
    "ep2-cp2-fsdp2": {"expert_model_parallel_size": 2, "data_parallel_shard_size": 2, "context_parallel_size": 2},
    "tp2-fsdp2": {"tensor_model_parallel_size": 2, "data_parallel_shard_size": 2},
    "tp2-ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "tp2-ep2-fsdp2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "data_parallel_shard_size": 2},
    "mxfp8-ep2-fsdp4": {"expert_model_parallel_size": 2, "data_parallel_shard_size": 4},
}
"""Layouts of four ranks; "mxfp8" stores weights quantized."""
MOE = tiny_moe().replace(mtp_num_layers=1)
QUANTIZED = CONFIGS["moe"].replace(hidden_size=128, mlp=tiny().mlp.replace(ffn_hidden_size=128))
if not shards_experts_apart():
    CASES = {name: sizes for name, sizes in CASES.items() if name in ("tp2-fsdp2", "tp2-ep2")}


def divided(config: ModelConfig, sizes: dict[str, int], weights: str | None = None) -> GPTModel:
    """The model of seed 0 in a layout."""
    mesh = ParallelDims(ranks=RANKS, **sizes).build_mesh("cpu")
    torch.manual_seed(0)
    model = GPTModel(config, device="meta", **process_groups(mesh.model))
    return parallelize(model, mesh, device="cpu", weights=None if weights is None else recipe(weights))


def whole(config: ModelConfig, weights: str | None) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(config, device="meta")
    return parallelize(model, None, device="cpu", weights=None if weights is None else recipe(weights))


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_folder_is_that_of_one_rank(case: str, tmp_path: Path) -> None:
    """File by file, byte for byte."""
    config, weights = (QUANTIZED, "mxfp8") if "mxfp8" in case else (MOE, None)
    model = divided(config, CASES[case], weights)
    model.save_pretrained(tmp_path / "saved")
    dist.barrier()
    if "sdp" not in case:
        mesh = ParallelDims(ranks=RANKS, **CASES[case]).build_mesh("cpu").model
        again = GPTModel.from_pretrained(tmp_path / "saved", device_mesh=mesh)
        for (name, read), saved in zip(again.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(read, saved), name
    if dist.get_rank() == 0:
        whole(config, weights).save_pretrained(tmp_path / "one")
        found, expected = (tmp_path / name for name in ("saved", "one"))
        names = sorted(file.name for file in expected.iterdir())
        assert sorted(file.name for file in found.iterdir()) == names
        for name in names:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    dist.barrier()


@on_ranks(4)
@pytest.mark.slow
def test_a_rank_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Whatever the rank: its part of the largest tensor, on the first rank also the whole of it."""
    model = divided(LARGE, CASES["tp2-fsdp2"])
    largest = 4 * max(math.prod(shape) for shape in expected_tensors(LARGE).values())
    peak = grown(lambda: model.save_pretrained(tmp_path / "large"))
    assert peak < 5 * largest // 2 + SLACK, f"{peak >> 20} MiB"
