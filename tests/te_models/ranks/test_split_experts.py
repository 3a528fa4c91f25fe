"""Models whose experts are split over other ranks than their layers: the whole model's values, logits, gradients and
files; what cannot be split so is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.rank_shards import Place, parts
from te_models.config import ConfigError
from te_models.layouts import Facts, check_layout_rules
from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.configs import tiny, tiny_moe

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.te_models.split_experts_ranks import CASES
else:
    CASES = ("none",)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("split") / "results"
    module = "tests.te_models.split_experts_ranks"
    return outcomes_on_ranks(module, results, only=selected(request, "case"), timeout=300)


@pytest.mark.sentinels("etp2 moe_biases all_to_all", "tp2_etp1_ep2 moe_shared all_gather")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok"] * 2


@pytest.mark.parametrize("tp", [1, 4])
def test_gate_and_up_rows_are_cut_apart(tp: int) -> None:
    """By the ranks that split experts, whatever splits the layers; they cover each stack once."""
    config = tiny_moe()
    shapes = expected_tensors(config)
    weight = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    experts, rows, _ = shapes[weight]
    seen = torch.zeros(experts, rows, dtype=torch.int64)
    for ep in range(2):
        for etp in range(2):
            changed = Place(tp_size=tp, ep_rank=ep, ep_size=2, etp_rank=etp, etp_size=2)
            part = parts(config, shapes, changed)[weight]
            assert part.ranges == (
                (etp * rows // 4, (etp + 1) * rows // 4),
                ((2 + etp) * rows // 4, (3 + etp) * rows // 4),
            )
            assert part.experts is not None
            for begin, end in part.ranges:
                seen[slice(*part.experts), begin:end] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("config", "layout", "sentence"),
    [
        (tiny(), "grouped", "moe is None: a model without experts has none to split"),
        (
            tiny_moe(moe_ffn_hidden_size=33),
            "grouped",
            "moe.moe_ffn_hidden_size is 33, which 2 ranks cannot share equally",
        ),
        (tiny_moe(), "per-gemm", "expert_layout is 'per-gemm'; allowed with expert_tensor_parallel_size: 'grouped'"),
        (
            tiny_moe(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
            "grouped",
            "moe.moe_pad_expert_input_to_capacity is True; allowed with expert_tensor_parallel_size: False",
        ),
    ],
)
def test_what_cannot_be_split_is_named(config: Any, layout: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout_rules(Facts(model=config, etp=2, apart=True, expert_layout=layout))
    assert sentence in str(raised.value)
