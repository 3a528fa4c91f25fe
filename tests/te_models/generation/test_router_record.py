"""Router replay: the choices of sampling are those of training, bit for bit, also under other weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, RouterRecord, generate, logprobs
from te_models.config import RouterConfig
from te_models.generation import compiled
from tests.build import VARIANTS, one_layer, tiny, tiny_moe, token_ids
from tests.compare import refused

ROUTERS = {
    "softmax": RouterConfig(),
    "sigmoid-bias": RouterConfig(score="sigmoid", expert_bias=True, scaling_factor=2.5),
    "after-topk": RouterConfig(score_after_topk=True, normalize=False),
}


def model_of(router: str = "softmax", seed: int = 0, **changes: Any) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(tiny_moe(ROUTERS[router], **changes)).eval()


def experts(model: GPTModel, ids: Tensor, **options: Any) -> Tensor:
    record = RouterRecord()
    with record.recording(model), torch.no_grad():
        model(ids, **options)
    assert record.indices is not None
    return record.indices


@pytest.mark.parametrize("router", ROUTERS)
def test_replaying_its_own_choices_changes_no_bit(router: str) -> None:
    model, ids = model_of(router).train(), token_ids(2, 9)
    record = RouterRecord(experts(model, ids))
    assert record.indices.shape == (2, 2, 9, 2)
    plain = model(ids, labels=ids)
    plain.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for checkpointing in (False, True):
        model.activation_checkpointing = checkpointing
        with record.replaying(model):
            again = model(ids, labels=ids)
            again.loss.backward()
        assert torch.equal(again.logits, plain.logits) and torch.equal(again.loss, plain.loss)
        for name, gradient in gradients.items():
            assert torch.equal(dict(model.named_parameters())[name].grad, gradient), name
        model.zero_grad()


def test_other_weights_choose_the_recorded_experts_and_routers_learn() -> None:
    model, other, ids = model_of(), model_of(seed=1).train(), token_ids(2, 9)
    record = RouterRecord(experts(model, ids))
    assert not torch.equal(experts(other, ids), record.indices)
    with record.replaying(other):
        assert torch.equal(experts(other, ids), record.indices)
        other(ids, labels=ids).loss.backward()
    assert not torch.equal(experts(other, ids), record.indices)  # as before
    assert other.decoder.layers[0].mlp.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_generated_text(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, in one graph and eagerly; the last token chooses by itself."""
    monkeypatch.setattr(compiled, "backend_for", lambda model: "eager")
    model, ids = model_of(), token_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    record = RouterRecord()
    with record.recording(model):
        tokens = generate(model, ids, 5, attention_mask=mask, temperature=1.0, seed=3, compile=compile)
    assert record.indices.shape == (2, 2, 10, 2) and tokens.shape == (2, 11)
    whole = torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], 1)
    with record.replaying(model, length=11):
        replayed = logprobs(model, tokens, attention_mask=whole)
    torch.testing.assert_close(replayed, logprobs(model, tokens, attention_mask=whole))
    with record.replaying(model, rows=slice(1, 2), length=11):
        torch.testing.assert_close(logprobs(model, tokens[1:]), replayed[1:])


def test_text_that_a_draft_model_proposes() -> None:
    """What is taken back from the cache is overwritten in the record."""
    model, draft, ids = model_of(), GPTModel(tiny(num_layers=1)).eval(), token_ids(1, 6)
    record = RouterRecord()
    with record.recording(model):
        tokens = generate(model, ids, 8, draft_model=draft, num_draft_tokens=3)
    columns = tokens.shape[1] - 1
    assert torch.equal(record.indices[:, :, :columns], experts(model, tokens)[:, :, :columns])


@pytest.mark.slow
def test_compiled_and_eager_replay_alike() -> None:
    model, other = (GPTModel(one_layer(model_of(seed=seed).config)).eval() for seed in (0, 1))
    ids = token_ids(2, 9)
    record = RouterRecord(experts(model, ids))
    run = torch.compile(lambda: logprobs(other, ids), fullgraph=True, backend="eager")
    with record.replaying(other):
        assert torch.equal(run(), logprobs(other, ids))
    free = run()
    assert torch.equal(free, logprobs(other, ids))
    with record.replaying(other):
        assert not torch.equal(run(), free)


def test_of_a_stage() -> None:
    model, other, ids = model_of(), model_of(seed=1), token_ids(2, 9)
    record = RouterRecord(experts(model, ids))
    first, last = other.stage(0, 1), other.stage(1, 2)
    with record.replaying(other):
        expected = logprobs(other, ids)
    with record.replaying(first), record.replaying(last):
        assert torch.equal(logprobs(last, ids, inputs_embeds=first(ids).hidden_states[-1]), expected)


def test_a_mixture_of_dense_and_hashed_layers() -> None:
    name = next(n for n, c in VARIANTS.items() if c.moe is not None and c.moe.layers is not None)
    torch.manual_seed(0)
    model, ids = GPTModel(VARIANTS[name]).eval(), token_ids(2, 9)
    record = RouterRecord(experts(model, ids))
    assert len(record.indices) == len(model.config.moe.layers)
    with record.replaying(model):
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_records_of_other_shapes_and_models_are_refused() -> None:
    model, ids = model_of(), token_ids(2, 9)
    record = RouterRecord(experts(model, ids))
    with record.replaying(model), pytest.raises(ValueError, match=r"choices of \[2, 9\] tokens; allowed in"):
        model(ids[:, :8])
    with pytest.raises(ValueError, match="2 layers of 2 experts per token; allowed for this model: 2 layers of 1"):
        record.replaying(model_of(moe_router_topk=1)).__enter__()
    with pytest.raises(ValueError, match="names expert 3; allowed for this model: below 3"):
        record.replaying(model_of(num_moe_experts=3)).__enter__()
    refused(lambda: record.replaying(GPTModel(tiny())).__enter__(), "has no experts, so there are no choices")
    with pytest.raises(ValueError, match="length is 8; allowed for a record of 9 columns: 9 or more"):
        record.replaying(model, length=8).__enter__()
    refused(lambda: RouterRecord().replaying(model).__enter__(), "RouterRecord is empty")
    with pytest.raises(ValueError, match="nothing was recorded: no call of the model"), RouterRecord().recording(model):
        pass
    refused(lambda: RouterRecord(torch.zeros(3)), "indices has shape [3]")
