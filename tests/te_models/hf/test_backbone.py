"""`base_model` and `get_output_embeddings` give what a trainer needs that applies the output layer itself: hidden
states whose logits, with the configuration's scale and cap, are the model's, and the same gradients. Where the model's
loss has further terms, `base_model` refuses to train.

TRL's own SFTTrainer trains with both in tests/structure/test_example_runs.py."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="TEModelForCausalLM is a transformers model")
from te_models import GPTModel
from te_models.config import AttentionConfig, EmbeddingConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.hf import TEConfig, TEModelForCausalLM
from te_models.hf.cache import CACHE
from te_models.layers import Float8CurrentScaling

VOCABULARY = 61
EMBEDDINGS = {
    "own": EmbeddingConfig(),
    "shared": EmbeddingConfig(share_embeddings_and_output_weights=True),
    "biased": EmbeddingConfig(output_bias=True),
    "scaled and capped": EmbeddingConfig(logits_multiplier=0.25, logits_softcap=2.0),
}


def model_of(embedding: str = "own", **further: Any) -> TEModelForCausalLM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        max_position_embeddings=16,
        attention=AttentionConfig(num_attention_heads=2),
        mlp=MLPConfig(ffn_hidden_size=64),
        embedding=EMBEDDINGS[embedding],
        init_method_std=0.3,
        **further,
    )
    return TEModelForCausalLM(TEConfig(config=config.to_dict()), gpt=GPTModel(config))


def moe(**options: Any) -> MoEConfig:
    return MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, **options)


def prompt() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def own_loss(model: TEModelForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of `labels`, made of the backbone and the output layer, as TRL makes it."""
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * model.config.logit_scale
    cap = model.config.final_logit_softcapping
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_loss_and_gradients_are_the_models(embedding: str) -> None:
    model = model_of(embedding).train()
    model.recipe = Float8CurrentScaling()
    ids, mask = prompt(), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    losses, gradients = [], []
    for loss in (own_loss(model, ids, mask), model(input_ids=ids, attention_mask=mask, labels=ids).loss):
        model.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*losses)
    assert any(module is model.get_output_embeddings() for module in model.modules()), "as peft looks for it"
    assert gradients[0].keys() == gradients[1].keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(*gradients)


def test_a_cache_goes_in_and_comes_out() -> None:
    model, ids = model_of().eval(), prompt()
    whole = model.base_model(ids).last_hidden_state
    first = model.base_model(ids[:, :7], use_cache=True)
    rest = model.base_model(ids[:, 7:], **{CACHE: first[CACHE]})
    torch.testing.assert_close(torch.cat([first.last_hidden_state, rest.last_hidden_state], dim=1), whole)


def test_losses_with_further_terms_are_refused_in_training() -> None:
    ids = prompt()
    for model, term in (
        (model_of(moe=moe(aux_loss_coeff=0.01)), "the router losses"),
        (model_of(mtp_num_layers=1), "the loss of further predicted tokens"),
    ):
        with pytest.raises(ValueError, match=f"leaves out {term} of this model's loss; allowed: the loss that"):
            model.train().base_model(ids)
        model.eval().base_model(ids)
    model = model_of(moe=moe(aux_loss_coeff=0.01)).train()
    model.gpt.set_aux_loss_coeff(0.0)
    model.base_model(ids)
    model.gpt.output_layer.logits_z_loss_coeff = 1e-4
    with pytest.raises(ValueError, match="leaves out the z-loss of the logits of"):
        model.base_model(ids)


def test_transformers_does_not_take_it_for_another_model() -> None:
    """Its own methods look at `base_model` for encoders, decoders, inputs and plans of parallelism."""
    model = model_of()
    assert model.get_input_embeddings() is model.gpt.embedding.word_embeddings
    assert not model.supports_tp_plan and not model.supports_pp_plan
