"""Balance without an auxiliary loss: what counts, by how much biases move, and that ranks agree."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from te_models import GPTModel, compile_model, generate, update_expert_bias
from te_models.layers import autocast, checkpoint, recipe
from te_models.model.moe.expert_bias import biases_and_counts, has_expert_bias, max_load
from tests.build import VARIANTS, one_layer, tiny_moe, token_ids
from tests.ranks import on_ranks, own_part

# The compiler itself looks at the gradients of a compiled layer's inputs, which are not leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CONFIG = VARIANTS["moe_sigmoid_groups"]


def build(**changes: object) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(CONFIG.replace(**changes))


def counts(model: GPTModel) -> Tensor:
    return torch.stack([own for _, own in biases_and_counts(model)])


def biases(model: GPTModel) -> Tensor:
    return torch.stack([bias for bias, _ in biases_and_counts(model)])


def run(model: GPTModel, ids: Tensor, **arguments: object) -> Tensor:
    """One forward and backward pass; return how many tokens chose each expert."""
    output = model(ids, labels=ids, return_logits=False, **arguments)
    output.loss.backward()
    return output.tokens_per_expert


def test_a_bias_moves_against_the_load_by_the_rate() -> None:
    model = build()
    given = torch.tensor([[5, 1, 3, 3], [0, 0, 7, 2]])
    start = torch.tensor([[0.5, -0.25, 1e-3, 0.0], [0.1, 0.2, 0.3, 0.4]])
    for (bias, own), value, count in zip(biases_and_counts(model), start, given, strict=True):
        bias.copy_(value)
        own.copy_(count)
    assert torch.equal(update_expert_bias(model, 0.01), given)
    signs = torch.tensor([[-1.0, 1.0, 0.0, 0.0], [1.0, 1.0, -1.0, 1.0]])  # means of 3 and 2.25
    assert torch.equal(biases(model), start + signs * 0.01) and not counts(model).any()
    update_expert_bias(model, 0.01)  # nothing was counted, so nothing moves
    assert torch.equal(biases(model), start + signs * 0.01)


def test_layers_whose_experts_a_table_chooses_have_no_bias() -> None:
    model = GPTModel(VARIANTS["compressed"])
    run(model, token_ids(1, 8))
    start, load = biases(model), update_expert_bias(model, 0.01)
    assert len(load) == 3 and len(start) == 2
    signs = (load.sum(-1, keepdim=True) - load * load.shape[-1]).sign()
    assert torch.equal(biases(model), start + signs[1:] * 0.01)


def test_large_counts_are_compared_exactly() -> None:
    """Float32 would take these for equal."""
    model = build()
    for _, own in biases_and_counts(model):
        own.copy_(torch.tensor([2**40, 2**40 + 1, 2**40, 2**40 - 1]))
    update_expert_bias(model, torch.tensor(0.5))
    assert biases(model).tolist() == [[0.0, -0.5, 0.0, 0.5]] * 2


def test_training_passes_count_and_others_do_not() -> None:
    model, ids = build(), token_ids(2, 9)
    expected = run(model, ids) + run(model, token_ids(3, 7, seed=1))
    assert torch.equal(counts(model), expected) and expected.sum(-1).tolist() == [78, 78]
    with torch.no_grad():
        model(ids)
    generate(model, ids, 3)
    model.eval()(ids, labels=ids).loss.backward()
    assert torch.equal(counts(model), expected)
    assert torch.equal(update_expert_bias(model.train(), 0.0), expected)
    assert not biases(model).any() and not counts(model).any()


def test_padding_is_left_out_as_in_the_router_losses() -> None:
    """The choices of the tokens that are left are those of the texts alone."""
    model, ids, mask = build(), token_ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    assert run(model, ids, attention_mask=mask).sum(-1).tolist() == [36, 36]
    padded = counts(model)
    assert padded.sum(-1).tolist() == [28, 28]
    update_expert_bias(model, 0.0)
    run(model, ids[:1, 4:], position_ids=torch.arange(4, 9)[None])
    run(model, ids[1:])
    assert torch.equal(counts(model), padded)


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"])
def test_recomputation_does_not_count(name: str | None) -> None:
    model, ids = build(), token_ids(2, 9)
    model.activation_checkpointing = True
    with autocast(enabled=name is not None, recipe=name and recipe(name)):
        expected = run(model, ids)
        assert torch.equal(counts(model), expected)
        loss = checkpoint(lambda: model(ids, labels=ids, return_logits=False).loss)
    loss.backward()
    assert counts(model).sum() == 2 * expected.sum()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed with padding"])
@pytest.mark.parametrize("mode", ["whole", "block"])
def test_compiled_counts_are_those_of_eager(mode: str, recompute: bool) -> None:
    mask = torch.ones(2, 9, dtype=torch.bool) if recompute else None
    if mask is not None:
        mask[0, :3] = False
    eager, compiled = build(), compile_model(build(), mode, dynamic=False, backend="aot_eager")
    for model in (eager, compiled):
        model.activation_checkpointing = recompute
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            for micro_batch in range(2):
                ids = token_ids(2, 9, seed=2 * step + micro_batch)
                assert torch.equal(*(run(model, ids, attention_mask=mask) for model in (compiled, eager)))
        assert torch.equal(counts(compiled), counts(eager))
        rate = 0.1 / (step + 1)
        update_expert_bias(compiled, rate)
        assert update_expert_bias(eager, rate).sum(-1).tolist() == [60 if recompute else 72] * 2
        assert torch.equal(biases(compiled), biases(eager)) and biases(eager).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "delayed"])
def test_counts_compiled_by_inductor(name: str | None) -> None:
    eager = GPTModel(one_layer(CONFIG))
    compiled = compile_model(copy.deepcopy(eager))
    for step in range(3):
        ids = token_ids(2, 9, seed=step)
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            for model in (compiled, eager):
                model(ids, labels=ids, return_logits=False).loss.backward()
        assert counts(eager).sum() == 36 * (step + 1) and torch.equal(counts(compiled), counts(eager))


@pytest.mark.slow
def test_a_compiled_checkpoint_around_the_model_counts_once() -> None:
    model, ids = build(), token_ids(2, 9)

    def loss(ids: Tensor) -> Tensor:
        return checkpoint(lambda given: model(given, labels=given, return_logits=False).loss, ids)

    torch.compile(loss, fullgraph=True, backend="aot_eager")(ids).backward()
    assert counts(model).sum() == 72


def test_counts_are_kept_on_the_way_and_in_no_file() -> None:
    model = build()
    run(model, token_ids(2, 9))
    update_expert_bias(model, 0.3)
    run(model, token_ids(2, 9))
    expected, bias = counts(model).clone(), biases(model).clone()
    moved = copy.deepcopy(model).to(torch.bfloat16)
    assert torch.equal(counts(moved), expected) and torch.equal(biases(moved), bias)
    assert not [name for name in model.state_dict() if "counts" in name]
    assert not counts(GPTModel(CONFIG, device="meta").to_empty(device="cpu")).any()
    moved.reset_parameters()
    assert not counts(moved).any() and not biases(moved).any()


def test_the_fullest_expert_of_any_layer() -> None:
    assert max_load(torch.tensor([[2, 2, 2, 2], [1, 5, 1, 1]])) == 2.5
    assert max_load(torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2]])) == 1.0


def test_what_cannot_be_balanced_is_refused() -> None:
    plain = GPTModel(tiny_moe())
    assert not has_expert_bias(plain) and has_expert_bias(build())
    assert not [name for name, _ in plain.named_buffers() if "expert_bias" in name]
    with pytest.raises(ValueError, match=r"model has no expert bias; allowed: one whose .*expert_bias is true"):
        update_expert_bias(plain)
    for rate in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"rate is {rate}; allowed: zero or a positive number"):
            update_expert_bias(build(), rate)


RATE = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model was saved."""
    path = tmp_path_factory.mktemp("balance") / "model"
    build().save_pretrained(path)
    return path


def everything(ids: Tensor) -> Tensor:
    return ids


def two_steps(
    model: nn.Module,
    part: Callable[[Tensor], Tensor],
    group: Any = None,
    around: Callable[[int], Any] = contextlib.nullcontext,
    steps: Iterable[int] = range(2),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the counts and the biases of each step. part: what of a micro-batch is seen; around: its context."""
    counts, biases = [], []
    for step in steps:
        for i in range(2):
            ids = part(token_ids(4, 9, seed=2 * step + i))
            with around(i):
                model(ids, labels=ids, return_logits=False).loss.backward()
        counts.append(update_expert_bias(model, RATE, process_group=group))
        biases.append(torch.stack([bias for bias, _ in biases_and_counts(model)]))
    return counts, biases


def as_in_one_process(folder: Path, got: tuple[list[Tensor], list[Tensor]], times: int = 1) -> None:
    """times: how often each token was counted."""
    alone, _ = dist.new_subgroups(1)
    counts, biases = two_steps(GPTModel.from_pretrained(folder), everything, alone)
    for step in range(2):
        assert torch.equal(got[0][step], times * counts[step]), (step, got[0], counts)
        assert torch.equal(got[1][step], biases[step])
    assert biases[0].abs().max() == torch.tensor(RATE) and not torch.equal(*biases)


@on_ranks(2)
@pytest.mark.slow
def test_data_parallel_ranks_are_one_process(folder: Path) -> None:
    as_in_one_process(folder, two_steps(GPTModel.from_pretrained(folder), own_part))


@on_ranks(2)
@pytest.mark.slow
def test_distributed_data_parallel_ranks_are_one_process(folder: Path) -> None:
    """Which copies the first rank's buffers to the others, but not between the micro-batches of a step."""
    model = DistributedDataParallel(GPTModel.from_pretrained(folder))
    got = two_steps(model, own_part, around=lambda i: model.no_sync() if i == 0 else contextlib.nullcontext())
    as_in_one_process(folder, got)


def shard(folder: Path) -> nn.Module:
    model, mesh = GPTModel.from_pretrained(folder), init_device_mesh("cpu", (2,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@on_ranks(2)
@pytest.mark.slow
def test_sharded_ranks_are_one_process(folder: Path) -> None:
    as_in_one_process(folder, two_steps(shard(folder), own_part))


@on_ranks(2)
def test_sharded_ranks_that_continue_are_one_process(folder: Path) -> None:
    """The second step begins from a checkpoint of the first."""
    first, again = shard(folder), shard(folder)
    counts, biases = two_steps(first, own_part, steps=[0])
    dcp.save(first.state_dict(), checkpoint_id=f"{folder}-sharded")
    state = again.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}-sharded")
    again.load_state_dict(state)
    more = two_steps(again, own_part, steps=[1])
    as_in_one_process(folder, (counts + more[0], biases + more[1]))


@on_ranks(2)
def test_distributed_experts_are_one_process(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    as_in_one_process(folder, two_steps(GPTModel.from_pretrained(folder, device_mesh=mesh), own_part))


@on_ranks(2)
@pytest.mark.slow
def test_split_layers_are_one_process(folder: Path) -> None:
    """Both ranks see the same tokens: they are counted twice, and every bias moves as if once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    as_in_one_process(folder, two_steps(GPTModel.from_pretrained(folder, device_mesh=mesh), everything), times=2)
