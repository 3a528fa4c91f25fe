"""Balance without an auxiliary loss: what counts, by how much biases move, and that ranks agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, compile_model, generate, update_expert_bias
from te_models.layers import autocast, checkpoint, recipe
from te_models.model.moe.expert_bias import biases_and_counts, has_expert_bias, max_load
from tests.ranks import outcomes_on_ranks
from tests.te_models.configs import VARIANTS, one_layer, tiny_moe, token_ids

# The compiler itself looks at the gradients of a compiled layer's inputs, which are not leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CONFIG = VARIANTS["moe_sigmoid_groups"]
CASES = (
    "data_parallel",
    "distributed_data_parallel",
    "sharded",
    "sharded_and_continued",
    "distributed_experts",
    "split_layers",
)


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
    assert torch.equal(biases(model), start + signs * 0.01)
    assert not counts(model).any()
    update_expert_bias(model, 0.01)  # nothing was counted, so nothing moves
    assert torch.equal(biases(model), start + signs * 0.01)


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
    whole = run(model, ids, attention_mask=mask)
    assert whole.sum(-1).tolist() == [36, 36]
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
@pytest.mark.usefixtures("fresh_compiler")
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
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", [None, "delayed"])
def test_counts_compiled_by_inductor(name: str | None) -> None:
    torch.manual_seed(0)
    eager = GPTModel(one_layer(CONFIG))
    compiled = compile_model(copy.deepcopy(eager))
    for step in range(3):
        ids = token_ids(2, 9, seed=step)
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            for model in (compiled, eager):
                model(ids, labels=ids, return_logits=False).loss.backward()
        assert counts(eager).sum() == 36 * (step + 1)
        assert torch.equal(counts(compiled), counts(eager))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    folder = tmp_path_factory.mktemp("balance")
    build().save_pretrained(folder / "model")
    return outcomes_on_ranks("tests.te_models.expert_bias_ranks", folder / "results", str(folder / "model"), timeout=99)


@pytest.mark.sentinels("sharded_and_continued", "distributed_experts")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]
