"""A model that is split and sharded over four ranks has the values of the whole one, and each rank its own parts."""

from __future__ import annotations

import pytest
import torch

from te_models import GPTModel
from te_models.config import ConfigError
from te_models.parallel import ParallelDims
from te_models.parallel.sharding import shards_experts_apart
from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.parallelize_ranks import CASES, CONFIGS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

OF_EXPERTS = ("one_layer_at_a_time", "shards_stay_in_main_memory")
"""Cases whose experts are sharded apart from the other layers."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("parallelize")
    for name in ("dense", "moe_shared"):
        torch.manual_seed(3)
        GPTModel(CONFIGS[name]).save_pretrained(folder / name)
    module = "tests.te_models.parallelize_ranks"
    return outcomes_on_ranks(
        module, folder / "results", str(folder), ranks=4, only=selected(request, "case"), timeout=180
    )


@pytest.mark.costs(40)
@pytest.mark.sentinels(
    "start tied tp2_fsdp2",
    "anew moe_biases ep2_fsdp4",
    "anew stored, one scale",
    "load moe_shared ep2_tp2_fsdp2",
    "gradients tp2_etp1_ep2_fsdp2",
    "one_layer_at_a_time",
    "stored_weights_are_shards_of_the_whole",
    "unequal_shards_are_saved",
    "norms_of_nothing",
    "shards_stay_in_main_memory",
    "a_layout_has_one_mesh",
    "other_numbers_of_ranks_are_refused",
)
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    found = [outcome[case] for outcome in outcomes]
    if not shards_experts_apart() and (("ep2" in case and "fsdp" in case) or case in OF_EXPERTS):
        assert all("data_parallel_shard_size = 1, or torch 2.13" in text for text in found), "it has to be refused"
        return
    assert found == ["ok"] * 4


@pytest.mark.parametrize(
    ("sizes", "filled"),
    [
        ({}, (8, 1)),
        ({"data_parallel_shard_size": -1}, (1, 8)),
        ({"data_parallel_shard_size": 4}, (2, 4)),
        ({"data_parallel_shard_size": -1, "data_parallel_replicate_size": 2}, (2, 4)),
        ({"data_parallel_shard_size": -1, "tensor_model_parallel_size": 2}, (1, 4)),
        ({"tensor_model_parallel_size": 8, "expert_tensor_parallel_size": 8}, (1, 1)),
    ],
)
def test_sizes_that_are_left_open_are_filled(sizes: dict[str, int], filled: tuple[int, int]) -> None:
    dims = ParallelDims(ranks=8, **sizes)
    assert (dims.data_parallel_replicate_size, dims.data_parallel_shard_size) == filled
    assert dims.data_ranks == filled[0] * filled[1]
    assert dims == ParallelDims.of(dims.sizes() | {"another": 3}, 8)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"data_parallel_shard_size": 3},
            "data_parallel_shard_size is 3; allowed: a divisor of the number of ranks, 8",
        ),
        ({"data_parallel_shard_size": 0}, "is 0; allowed: a positive integer, or -1 for all ranks that are left"),
        ({"tensor_model_parallel_size": -1}, "tensor_model_parallel_size is -1; allowed: a positive integer"),
        (
            {"tensor_model_parallel_size": 5},
            "tensor_model_parallel_size is 5; allowed: a divisor of the number of ranks",
        ),
        (
            {"data_parallel_shard_size": 4, "tensor_model_parallel_size": 4},
            "data_parallel_shard_size is 4; allowed: a divisor of the number of ranks, 2",
        ),
        (
            {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2},
            "data_parallel_replicate_size is 2; allowed: 4, which the other sizes leave of 8 ranks",
        ),
        (
            {"data_parallel_shard_size": 2, "expert_model_parallel_size": 4},
            "expert_model_parallel_size is 4; allowed: a divisor of data_parallel_shard_size, 2",
        ),
        ({"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size is 3; allowed: a divisor of the number"),
        ({"context_parallel_size": 3}, "context_parallel_size is 3; allowed: a divisor of the number of ranks, 8"),
        (
            {"data_parallel_shard_size": 2, "expert_tensor_parallel_size": 4},
            "expert_tensor_parallel_size is 4; allowed: a divisor of data_parallel_shard_size, 2",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4, "expert_model_parallel_size": 4},
            "expert_model_parallel_size is 4; allowed: a divisor of data_parallel_replicate_size x "
            "tensor_model_parallel_size / expert_tensor_parallel_size, 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ParallelDims(ranks=8, **sizes)
    assert sentence in str(raised.value)
