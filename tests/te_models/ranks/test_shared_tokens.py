"""Two ranks that share tokens, between split layers or along the sequence, are the model of one rank: loss, router
losses, logits and gradients. The cases are in shared_tokens_ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from te_models.layers.distributed.vocab_parallel import vocab_range
from tests.te_models.configs import FURTHER, VARIANTS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
if torch.distributed.is_available():
    from tests.covering import selected
    from tests.ranks import outcomes_on_ranks

SP = ("sandwich", "parallel_shared_norm", "biases", "learned_positions", "qk_full", "latent", "sparse", "moe_shared")
SP = (*SP, "gated_heads", "gated_latent", "gated_channels_biases", "keys_of_earlier_layers")
CP = ("mixed_layers", "sinks_clip", "softcaps", "chunked_l2_temperature", "dynamic_rope", "latent", "moe")
CP = (*CP, "gated_heads", "several_attentions", "keys_of_earlier_layers", "sparse_latent")
CASES = [*(f"sp {name}" for name in (*SP, *FURTHER)), *(f"cp {name}" for name in (*CP, *FURTHER)), "refused"]
RING = ("mixed_layers", "sinks_clip", "softcaps", "chunked_l2_temperature", "latent", "moe", "gated_heads")
RING = (*RING, "several_attentions", "keys_of_earlier_layers", "alibi", *FURTHER)
CASES += [f"{way} {name}" for name in RING for way in ("p2p", "a2a")]
GROUPS = ("one_group", "one_group_biases", "one_group_gated", "one_group_moe", "mamba2_one_group")
TRAINED = ("sparse_trained", "sparse_latent_trained", "sparse_warmed", "sparse_latent_warmed")
CASES += [f"{kind} {name}" for name in (*GROUPS, *TRAINED) for kind in ("tp", "sp")]
CASES += ["logprobs sp moe_shared", "logprobs cp moe", "logprobs tp softcaps"]
MODULE = "tests.te_models.shared_tokens_ranks"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    return outcomes_on_ranks(
        MODULE, tmp_path_factory.mktemp("shared") / "results", *selected(request, "case"), timeout=300
    )


@pytest.mark.sentinels(
    "sp sandwich",
    "sp moe_shared",
    "cp mixed_layers",
    "cp latent",
    "cp moe_ahead",
    "p2p chunked_l2_temperature",
    "p2p sinks_clip",
    "a2a latent",
    "a2a alibi",
    "sp one_group_biases",
    "tp mamba2_one_group",
    "sp sparse_latent_trained",
    "refused",
    "logprobs sp moe_shared",
    "logprobs cp moe",
    "logprobs tp softcaps",
)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """More ranks than groups of keys, and than groups of Mamba-2."""
    cases = [f"{way} {name}" for name in RING for way in ("p2p", "a2a")]
    cases += [f"tp {name}" for name in ("dense", "sinks_clip", "gated_channels", "mamba2", *GROUPS, *TRAINED)]
    cases += [f"sp {name}" for name in ("gated_heads", "value_width", "mamba2_one_group", "sparse_trained")]
    outcomes = outcomes_on_ranks(MODULE, tmp_path / "results", *cases, ranks=4, timeout=900)
    assert outcomes == [dict.fromkeys(cases, "ok")] * 4


@pytest.mark.slow
def test_every_kind_of_model(tmp_path: Path) -> None:
    cases = [f"{kind} {name}" for kind in ("sp", "cp", "p2p", "a2a") for name in VARIANTS]
    refused = ("sp alternating_updates", "sp sparse_gates", "sp compressed", "cp compressed")
    by_ring = ("compressed", "sparse", "sparse_latent", "sparse_gates")
    refused = (*refused, *(f"{way} {name}" for way in ("p2p", "a2a") for name in by_ring))
    cases = [case for case in cases if case not in refused]
    cases += ["compiled sp moe_shared", "compiled cp moe_shared", "compiled cp latent"]
    cases += [f"compiled {way} {name}" for way in ("p2p", "a2a") for name in ("moe_shared", "latent")]
    cases += ["compiled sp moe_ahead", "compiled cp tied_latent_ahead"]
    assert outcomes_on_ranks(MODULE, tmp_path / "results", *cases, timeout=1500) == [dict.fromkeys(cases, "ok")] * 2


def test_each_position_and_each_word_is_of_one_rank() -> None:
    """And the ranks see equally many keys under a causal mask."""
    positions = torch.arange(24)[None]
    own = [own_positions(positions, ContextShard(rank, 3, "")) for rank in range(3)]
    assert [each.tolist() for each in own[:1]] == [[[0, 1, 2, 3, 20, 21, 22, 23]]]
    assert torch.equal(torch.cat(own, 1).sort().values, positions)
    assert len({int((each + 1).sum()) for each in own}) == 1
    for words, ranks in ((61, 2), (10, 4), (4, 4), (257, 8)):
        ends = [vocab_range(words, rank, ranks) for rank in range(ranks)]
        assert [w for begin, end in ends for w in range(begin, end)] == list(range(words))
        assert {end - begin for begin, end in ends} <= {words // ranks, -(-words // ranks)}
