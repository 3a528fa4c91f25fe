"""GPTModel split over two ranks: each reads its own parts, and together they are the whole model."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from te_models import AttentionConfig, ConfigError, GPTModel, ModelConfig
from te_models.checkpoints import CheckpointError, expected_tensors, open_checkpoint, quantize
from te_models.checkpoints.mapping.rank_shards import Place, RankPart, parts
from te_models.config import MLAConfig, MLPConfig, MoEConfig, NormConfig
from te_models.layouts import Facts, check_layout_rules
from tests.checkpoints.family_cases import CASES as FAMILY_CASES
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import transformers
from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.hf_models import hf_model

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.te_models.split_model_ranks import CASES, QUANTIZED_CASES
else:
    CASES = QUANTIZED_CASES = ("none",)

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8, v_head_dim=6, sinks=True),
    mlp=MLPConfig(ffn_hidden_size=40),
    moe=MoEConfig(num_moe_experts=3, moe_router_topk=2, moe_ffn_hidden_size=36, layers=(1,)),
)

# every part is whole blocks of 128, with two ranks
BLOCKS = CONFIG.replace(
    hidden_size=128,
    attention=AttentionConfig(num_attention_heads=4, kv_channels=64),
    mlp=MLPConfig(ffn_hidden_size=256),
    moe=MoEConfig(num_moe_experts=3, moe_router_topk=2, moe_ffn_hidden_size=256, layers=(1,)),
)


def model(case: str) -> transformers.PreTrainedModel | GPTModel:
    if case == "sinks":  # no family: with a dense layer beside the mixture
        return GPTModel(CONFIG)
    return make(case) if case in FAMILY_CASES else hf_model(case)


def run(folder: Path, models: tuple[str, ...], *cases: str) -> list[dict[str, str]]:
    """Save the models, run the cases on two ranks, return what each rank says of each case."""
    for name in models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(name).save_pretrained(folder / name)
    return outcomes_on_ranks("tests.te_models.split_model_ranks", folder / "results", str(folder), *cases, timeout=400)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    folder = tmp_path_factory.mktemp("split")
    torch.manual_seed(0)
    GPTModel(BLOCKS).save_pretrained(folder / "plain")
    for case in QUANTIZED_CASES:
        quantize(folder / "plain", folder / case, case)
    cases = selected(request, "case")
    return run(folder, tuple(name for name in CASES if name in cases or "memory" in cases), *cases)


@pytest.mark.costs(40)
@pytest.mark.sentinels("sinks", "deepseek_v3", "kimi_linear-flags", "mxfp8")
@pytest.mark.parametrize("case", ["memory", *CASES, *QUANTIZED_CASES])
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


@pytest.mark.slow
def test_two_ranks_compiled(tmp_path: Path) -> None:
    names = ("qwen3", "olmo2", "deepseek_v3", "gpt_oss")
    cases = [f"compiled-{name}" for name in names]
    assert run(tmp_path, names, *cases) == [dict.fromkeys(cases, "ok")] * 2


@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_all_ranks_are_the_whole(layout: str, ranks: int) -> None:
    """Along the split dimension every index belongs to one rank, equally many to each but of 61 words; what is not
    split belongs to all."""
    shapes = expected_tensors(CONFIG, layout)
    owned = [parts(CONFIG, shapes, Place(tp_rank=rank, tp_size=ranks)) for rank in range(ranks)]
    split = set()
    for name, shape in shapes.items():
        mine = [own[name] for own in owned]
        if mine[0].dim is None:
            assert mine == [RankPart()] * ranks
            continue
        split.add(re.sub(r"decoder\.layers\.\d+\.", "", name).rstrip("0123456789"))
        indices = [i for part in mine for begin, end in part.ranges for i in range(begin, end)]
        assert sorted(indices) == list(range(shape[mine[0].dim]))
        each = sorted(part.shape(shape)[part.dim] for part in mine)
        assert each == ([30, 31] if shape[mine[0].dim] == 61 else [shape[mine[0].dim] // ranks] * ranks)
    assert split == (set() if ranks == 1 else {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.core_attention.softmax_offset",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp.experts.linear_fc1.weight",
        "mlp.experts.linear_fc2.weight",
    })  # fmt: skip


def test_a_rank_has_whole_heads_and_matching_gate_and_up_rows() -> None:
    part = parts(CONFIG, expected_tensors(CONFIG), Place(tp_rank=1, tp_size=2))
    assert part["decoder.layers.0.self_attention.linear_qkv.weight"] == RankPart(0, ((16, 32), (40, 48), (54, 60)))
    assert part["decoder.layers.0.mlp.linear_fc1.weight"] == RankPart(0, ((20, 40), (60, 80)))
    assert part["decoder.layers.1.mlp.experts.linear_fc1.weight"] == RankPart(1, ((18, 36), (54, 72)))
    assert part["decoder.layers.1.mlp.experts.linear_fc2.weight"] == RankPart(2, ((18, 36),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": AttentionConfig(num_attention_heads=4, num_query_groups=1)}, "num_query_groups is 1, which 2"),
        (
            {
                "attention": AttentionConfig(num_attention_heads=4, qk_layernorm="full"),
                "norm": NormConfig(normalization="LayerNorm"),
            },
            "attention.qk_layernorm: a model with a LayerNorm over all heads cannot be split over 2 ranks",
        ),
        ({"attention": AttentionConfig(num_attention_heads=5, mla=MLAConfig())}, "num_attention_heads is 5, which 2"),
        ({"mlp": MLPConfig(ffn_hidden_size=41)}, "mlp.ffn_hidden_size is 41, which 2 ranks cannot share equally"),
        ({"moe": MoEConfig(num_moe_experts=2, moe_router_topk=1, moe_ffn_hidden_size=7)}, "moe_ffn_hidden_size is 7"),
    ],
)
def test_what_cannot_be_split_is_refused(changes: dict, message: str) -> None:
    config = CONFIG.replace(**changes)
    check_layout_rules(Facts(model=config, tp=1, etp=1))
    with pytest.raises(ConfigError, match=message):
        check_layout_rules(Facts(model=config, tp=2, etp=2))


def test_a_split_within_a_block_is_refused(tmp_path: Path) -> None:
    """Two ranks share 80 rows of 128-blocks, and 40 columns; a tensor that has one scale can be cut anywhere."""
    GPTModel(CONFIG).save_pretrained(tmp_path / "plain")
    for recipe in ("block", "current"):
        quantize(tmp_path / "plain", tmp_path / recipe, recipe)
        with open_checkpoint(tmp_path / recipe) as checkpoint:
            shapes = expected_tensors(checkpoint.config)
            place = Place(tp_rank=1, tp_size=2)
            owned = parts(checkpoint.config, shapes, place)
            params = {name: torch.empty(owned[name].shape(shape)) for name, shape in shapes.items()}
            with pytest.raises(CheckpointError, match=r"has shape .*; expected: "):
                checkpoint.load_into(params)
            if recipe == "current":
                checkpoint.load_into(params, place=place)
                continue
            message = (
                r"linear_qkv.weight is quantized in blocks of 128 rows, between which it cannot be split so; allowed:"
            )
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load_into(params, place=place)
