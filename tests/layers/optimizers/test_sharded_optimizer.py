"""The state of FusedAdamW over FSDP2 goes through a distributed checkpoint, on two ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from te_models.layers import FusedAdamW, Linear
from te_models.layers.tensor.fsdp import local_part
from tests.ranks import on_ranks


def stepped(moments: str, rows: int, columns: int = 200) -> tuple[Linear, FusedAdamW]:
    """Return a layer and its optimizer after two steps."""
    torch.manual_seed(0)
    model = Linear(columns, rows, bias=False)
    x, slope = torch.randn(2, 16, columns), torch.randn(16, rows)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = FusedAdamW(model.parameters(), lr=0.01, moment_dtype=moments)
    for batch in x:
        (model(batch) * slope).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy this rank's bytes of an optimizer's state."""
    return {name: local_part(t).detach().clone().reshape(-1).view(torch.uint8) for name, t in state.items()}


@on_ranks(2)
@pytest.mark.sentinels("256-float32", "1-bfloat16", "3-float8")
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("rows", [256, 3, 1])  # of the weight: equal shards, unequal ones, and one that is empty
def test_moments_come_back_on_every_rank(moments: str, rows: int, tmp_path: Path) -> None:
    model, optimizer = stepped(moments, rows)
    state = optimizer.state[model.weight]
    before = bits(state)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    for tensor in state.values():
        local_part(tensor).reshape(-1).view(torch.uint8).zero_()
    found = get_optimizer_state_dict(model, optimizer)
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, optimizer, found)
    after = bits(optimizer.state[model.weight])
    assert before.keys() == after.keys()
    for name, expected in before.items():
        assert torch.equal(after[name], expected), name
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_fp8_moments_of_other_shards_are_refused(tmp_path: Path) -> None:
    """Shards of 100 elements and a whole of 200 have two blocks of moments, which hold other elements."""
    model, optimizer = stepped("float8", 2, 100)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    whole = Linear(100, 2, bias=False)
    alone = FusedAdamW(whole.parameters(), lr=0.01, moment_dtype="float8")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(get_optimizer_state_dict(whole, alone), checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="sharded over another number of ranks"):
        alone.load_state_dict(optimizer.state_dict())


@on_ranks(2)
def test_whole_blocks_serve_any_number_of_ranks(tmp_path: Path) -> None:
    model, optimizer = stepped("float8", 4, 64)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    whole = Linear(64, 4, bias=False)
    alone = FusedAdamW(whole.parameters(), lr=0.01, moment_dtype="float8")
    found = get_optimizer_state_dict(whole, alone)
    dcp.load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(whole, alone, found)
    rank = torch.distributed.get_rank()
    for name, tensor in optimizer.state[model.weight].items():
        here = alone.state[whole.weight][name]
        mine = here.chunk(2)[rank] if here.dim() else here
        assert torch.equal(mine.float(), local_part(tensor).float()), name
