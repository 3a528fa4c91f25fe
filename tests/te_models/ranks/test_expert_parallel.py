"""Models whose experts are distributed over ranks: the whole model's logits and gradients, at the cost of each rank's
own experts."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from te_models import AttentionConfig, ConfigError, GPTModel
from te_models.checkpoints import CheckpointError, expected_tensors, open_checkpoint, quantize
from te_models.checkpoints.mapping.rank_shards import Place, parts
from te_models.layouts import Facts, check_layout_rules
from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.configs import tiny, tiny_moe
from tests.te_models.hf_models import hf_model

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.te_models.expert_parallel_ranks import CASES, FOLDER_CASES, FOUR_RANKS
else:
    CASES = FOLDER_CASES = FOUR_RANKS = ("none",)


def run(folder: Path, *cases: str, ranks: int = 2) -> list[dict[str, str]]:
    """Run the cases on so many ranks, return what each says of each case."""
    module, results = "tests.te_models.expert_parallel_ranks", folder / "results"
    return outcomes_on_ranks(module, results, str(folder), *cases, ranks=ranks, timeout=900)


def save_models(folder: Path) -> None:
    """Write the folders of FOLDER_CASES."""
    torch.manual_seed(0)
    # enough columns for blocks of 32 and of 16, rows that no block of 128 divides
    config = tiny_moe(num_moe_experts=4, moe_ffn_hidden_size=160, shared_expert_intermediate_size=48)
    GPTModel(config).save_pretrained(folder / "plain")
    for case in FOLDER_CASES[2:]:
        quantize(folder / "plain", folder / case, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_model("qwen3_moe").save_pretrained(folder / "hf")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    folder = tmp_path_factory.mktemp("experts")
    save_models(folder)
    return run(folder, *selected(request, "case"))


@pytest.mark.costs(40)
@pytest.mark.sentinels(
    "moe-float32-all_to_all",
    "moe_sigmoid_groups-bfloat16-all_gather",
    "moe_shared-mxfp8-all_to_all",
    "moe_biases-float32-all_gather",
    "empty_experts",
    "sequences_and_global_batch",
    "uneven",
    "generated",
    "delayed",
    "hf",
    "mxfp8",
)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


@pytest.mark.slow
def test_four_ranks_that_also_split_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # every part is whole blocks of 32, with two ranks
    attention = AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=32)
    config = tiny_moe(moe_ffn_hidden_size=128, shared_expert_intermediate_size=64).replace(attention=attention)
    GPTModel(config).save_pretrained(tmp_path / "split")
    quantize(tmp_path / "split", tmp_path / "split-mxfp8", "mxfp8")
    assert run(tmp_path, *FOUR_RANKS, ranks=4) == [dict.fromkeys(FOUR_RANKS, "ok")] * 4


@pytest.mark.slow
def test_two_ranks_compiled_down_to_kernels(tmp_path: Path) -> None:
    cases = ("compiled_backward", "compiled_by_inductor")
    assert run(tmp_path, *cases) == [dict.fromkeys(cases, "ok")] * 2


def test_a_scale_that_is_no_number_is_found_by_the_rank_that_owns_it(tmp_path: Path) -> None:
    GPTModel(tiny_moe()).save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "fp8", "mxfp8")
    scale = "decoder.layers.1.mlp.experts.linear_fc1.weight_scale_inv"
    file = tmp_path / "fp8" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        metadata = opened.metadata()
    tensors[scale][3, 0, 0] = 255
    save_file(tensors, file, metadata)
    (tmp_path / "fp8/manifest.json").unlink()
    with open_checkpoint(tmp_path / "fp8") as checkpoint:
        shapes = expected_tensors(checkpoint.config)
        for rank in range(2):
            place = Place(ep_rank=rank, ep_size=2)
            owned = parts(checkpoint.config, shapes, place)
            params = {name: torch.empty(owned[name].shape(shape)) for name, shape in shapes.items()}
            with pytest.raises(CheckpointError, match=scale) if rank == 1 else contextlib.nullcontext():
                checkpoint.load_into(params, place=place)


@pytest.mark.parametrize(
    ("config", "ranks", "layout", "message"),
    [
        (tiny(), 2, "grouped", "moe is None: a model without experts has none to distribute"),
        (tiny_moe(), 3, "grouped", "num_moe_experts is 4, which 3 ranks cannot share equally"),
        (tiny_moe(), 2, "per-gemm", "expert_layout is 'per-gemm'; allowed where experts are distributed: 'grouped'"),
    ],
)
def test_what_cannot_be_distributed_is_refused(config, ranks: int, layout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout_rules(Facts(model=config, ep=ranks, distributed=True, expert_layout=layout))
