"""Models sharded by FSDP2 and compiled block by block, on two ranks."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from te_models import GPTModel, MLPConfig, compile_model
from te_models.layers import FusedAdamW, QuantizedTensor, autocast, quantized_model_init, recipe
from tests.build import tiny, tiny_moe, token_ids
from tests.compare import raw
from tests.layers.matrix_recipes import compute_the_loss_as_compiled
from tests.ranks import on_ranks

WIDE = {"hidden_size": 64, "mlp": MLPConfig(ffn_hidden_size=64)}
"""Every weight's rows are a multiple of 64: two shards of whole 32-blocks."""
CONFIGS = {"dense": tiny(**WIDE), "moe": tiny_moe(moe_ffn_hidden_size=32).replace(**WIDE)}
LENGTHS = ((9, 9), (9, 14), (6, 6))
"""Tokens per sequence in each step, on each rank."""


def build(kind: str, stored: bool) -> GPTModel:
    """Equal in every process."""
    torch.manual_seed(0)
    with quantized_model_init(enabled=stored, recipe=recipe("mxfp8") if stored else None):
        return GPTModel(CONFIGS[kind])


def shard(model: GPTModel) -> None:
    """Each layer by itself, and the rest."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def with_the_loss_as_compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compute_the_loss_as_compiled(patch)
        yield


on_two_ranks = on_ranks(2, timeout=900, within=with_the_loss_as_compiled)


def batch(step: int, rank: int) -> Tensor:
    return token_ids(2, LENGTHS[step][rank], seed=10 * step + rank)


def train(model: GPTModel, name: str | None) -> list[Tensor]:
    """Return each step's loss, and the parameters at the end."""
    optimizer, losses = FusedAdamW(model.parameters(), lr=0.01), []
    for step in range(len(LENGTHS)):
        ids = batch(step, dist.get_rank())
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    fields: list[Tensor] = []
    for parameter in model.parameters():
        local = parameter.detach()._local_tensor
        fields += [raw(f) for f in local.fields.values()] if isinstance(local, QuantizedTensor) else [local]
    return [*losses, *fields]


@on_two_ranks
@pytest.mark.slow
@pytest.mark.parametrize("first", ["shard", "compile"])
@pytest.mark.parametrize(("name", "stored"), [(None, False), ("mxfp8", False), ("mxfp8", True), ("delayed", False)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_compiled_blocks_train_as_eager_ones(kind: str, name: str | None, stored: bool, first: str) -> None:
    """Bit for bit, over steps whose lengths change and differ between the ranks. first: which comes first."""
    eager, compiled = build(kind, stored), build(kind, stored)
    assert any(isinstance(p, QuantizedTensor) for p in compiled.parameters()) == stored
    shard(eager)
    if first == "compile":
        compile_model(compiled, "block", backend="aot_eager", timeout_s=100)
        shard(compiled)
    else:
        shard(compiled)
        compile_model(compiled, "block", backend="aot_eager", timeout_s=100)
    start = [p.detach()._local_tensor for p in compiled.parameters()]
    moving = [i for i, p in enumerate(start) if not isinstance(p, QuantizedTensor)]
    before = [start[i].clone() for i in moving]
    expected, got = train(eager, name), train(compiled, name)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not all(torch.equal(start[i], b) for i, b in zip(moving, before, strict=True)), "nothing was trained"
    assert not counters["graph_break"], dict(counters["graph_break"])
    # a layer and the output layer, each for the first shape and then for all
    assert counters["stats"]["unique_graphs"] == 4


@on_two_ranks
@pytest.mark.slow
def test_sharded_training_equals_that_of_one_process() -> None:
    """The mean over ranks of the gradients is the gradient of the mean loss, but for the order of sums."""
    whole, sharded = build("dense", False), build("dense", False)
    shard(sharded)
    compile_model(sharded, "block", backend="aot_eager", timeout_s=100)
    for rank in range(2):
        ids = batch(1, rank)
        (whole(ids, labels=ids, return_logits=False).loss / 2).backward()
    ids = batch(1, dist.get_rank())
    sharded(ids, labels=ids, return_logits=False).loss.backward()
    for ours, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)


@on_two_ranks
@pytest.mark.slow
def test_whole_mode_is_refused() -> None:
    model = build("dense", False)
    shard(model)
    with pytest.raises(ValueError, match='sharded by FSDP2; allowed: mode="block"'):
        compile_model(model, "whole")
