"""The parts of quantized Hugging Face folders that ranks own: the fields of the whole, exactly, and no other expert."""

from pathlib import Path

import pytest
import torch

import te_models.checkpoints.mapping.stream as move
from te_models.checkpoints import Checkpoint, CheckpointError, expected_tensors, open_checkpoint
from te_models.checkpoints.mapping.rank_shards import WHOLE, ShardPlace, parts
from te_models.layers import QuantizedTensor
from tests.checkpoints.quantized_cases import CASES, make
from tests.compare import same_bits

WITH_EXPERTS = [case for case, made in CASES.items() if made.model != "qwen3"]
CUT_BETWEEN_BLOCKS = ["mxfp8", "modelopt-fp8", "modelopt-nvfp4", "nvfp4-pack-quantized"]


def load(checkpoint: Checkpoint, place: ShardPlace) -> dict[str, torch.Tensor]:
    """Everything that a rank owns."""
    shapes = expected_tensors(checkpoint.config)
    owned = parts(checkpoint.config, shapes, place)
    params = {name: torch.zeros(owned[name].shape(shape), dtype=torch.bfloat16) for name, shape in shapes.items()}
    params |= dict(checkpoint.empty_quantized("grouped", "cpu", place))
    checkpoint.load_into(params, place=place)
    return params


def check(source: Path, places: list[ShardPlace]) -> None:
    with open_checkpoint(source) as checkpoint:
        whole = load(checkpoint, WHOLE)
        assert any(isinstance(tensor, QuantizedTensor) for tensor in whole.values())
        for place in places:
            owned = parts(checkpoint.config, expected_tensors(checkpoint.config), place)
            cut = 0
            for name, tensor in load(checkpoint, place).items():
                expected = whole[name]
                if owned[name].experts is not None:
                    begin, end = owned[name].experts
                    expected = expected.narrow(0, begin, end - begin)
                offset, dim = 0, owned[name].dim or 0
                for begin, end in owned[name].ranges or ((0, tensor.shape[0]),):
                    mine, its = tensor.narrow(dim, offset, end - begin), expected.narrow(dim, begin, end - begin)
                    equal = same_bits(mine, its) if isinstance(mine, QuantizedTensor) else torch.equal(mine, its)
                    assert equal, (name, place)
                    offset += end - begin
                cut += bool(owned[name].cuts()) and isinstance(tensor, QuantizedTensor)
            assert cut >= 2


@pytest.mark.sentinels("modelopt-nvfp4-stacks", "mxfp4-gpt-oss", "fp8-moe", "mxfp8-quantized")
@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_each_rank_loads_its_own_experts(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = make(CASES[case], tmp_path)
    with open_checkpoint(source) as checkpoint:
        experts = checkpoint.config.moe.num_moe_experts
    ranks = 2 if experts % 2 == 0 else experts
    check(source, [ShardPlace(ep_rank=rank, ep_size=ranks) for rank in range(ranks)])
    read: set[str] = set()
    for name in ("read_piece", "_read_in_place"):
        kept = getattr(move, name)

        def noted(store, piece, *out, kept=kept):
            read.add(piece.source)
            return kept(store, piece, *out)

        monkeypatch.setattr(move, name, noted)
    with open_checkpoint(source) as checkpoint:
        load(checkpoint, ShardPlace(ep_rank=0, ep_size=ranks))
    one_by_one = {name for name in read if ".experts." in name and ".experts.0." in name}
    others = {name for name in read if f".experts.{experts - 1}." in name}
    assert not others and bool(one_by_one) == (
        case != "mxfp4-gpt-oss" and "stacks" not in case
    )  # whose files hold all experts as one tensor


@pytest.mark.sentinels("mxfp8", "modelopt-fp8")
@pytest.mark.parametrize("case", CUT_BETWEEN_BLOCKS)
def test_each_rank_loads_its_own_heads(tmp_path: Path, case: str) -> None:
    source, _ = make(CASES[case], tmp_path)
    check(source, [ShardPlace(tp_rank=rank, tp_size=2) for rank in range(2)])


@pytest.mark.parametrize(("case", "block"), [("fp8-moe", "128 rows"), ("mxfp8-quantized", "32 columns")])
def test_heads_and_columns_within_a_block_are_refused(tmp_path: Path, case: str, block: str) -> None:
    """64 rows of k for each of two ranks, and 48 columns of a ragged expert."""
    source, _ = make(CASES[case], tmp_path)
    with (
        open_checkpoint(source) as checkpoint,
        pytest.raises(CheckpointError, match=f"is quantized in blocks of {block}, between which it cannot be split so"),
    ):
        load(checkpoint, ShardPlace(tp_rank=0, tp_size=2))
