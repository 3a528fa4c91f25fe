"""Layers that predict further tokens: transformers' own modules as the reference, what counts, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from te_models import ConfigError, GPTModel
from te_models.config import MoEConfig
from te_models.model.mtp import labels_of_depth
from tests.build import tiny, token_ids


def _model(depths: int = 2, **changes: object) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(tiny(mtp_num_layers=depths, **changes)).train()


def test_loss_is_that_of_further_tokens() -> None:
    model, ids = _model(), token_ids(2, 12)
    hidden = model.eval()(ids, return_hidden_states=True, return_logits=False).hidden_states
    output = model.train()(ids, labels=ids)
    h, embedded = hidden[-1], hidden[0]
    inputs = model.decoder.layer_inputs(embedded, torch.arange(12)[None], None)
    expected = []
    for depth, layer in enumerate(model.mtp.layers, 1):
        joined = torch.cat([layer.enorm(embedded[:, depth:]), layer.hnorm(h[:, : 12 - depth])], -1)
        tables = [(cos[:, : 12 - depth], sin[:, : 12 - depth]) for cos, sin in inputs.tables]
        x, _ = layer.transformer_layer(joined @ layer.eh_proj.weight.T, tables[0])
        h = F.pad(layer.final_layernorm(x), (0, 0, 0, depth))
        table = model.embedding.word_embeddings.weight if model.output_layer.weight is None else None
        logits, _, _ = model.output_layer(h[:, : 11 - depth], table, None, return_logits=True)
        expected.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1 + depth :].flatten()))
    assert output.mtp_loss.item() == pytest.approx(sum(expected).item() / 2, rel=1e-5)
    main = model.eval()(ids, labels=ids).loss.item()
    assert output.loss.item() == pytest.approx(main + 0.1 * output.mtp_loss.item(), rel=1e-6)
    assert model(ids, labels=ids).mtp_loss is None, "evaluation measures the model alone"


def test_documents_do_not_predict_each_other() -> None:
    labels = torch.arange(100, 108)[None]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    mask = documents[:, :, None] == documents[:, None, :]
    assert labels_of_depth(labels, None, 1).tolist() == [[101, 102, 103, 104, 105, 106, 107, -100]]
    # position 3 would read token 4, of the next text
    assert labels_of_depth(labels, mask, 1).tolist() == [[101, 102, 103, 104, -100, 106, 107, -100]]
    assert labels_of_depth(labels, mask, 2).tolist() == [[102, 103, 104, -100, -100, 107, -100, -100]]
    assert labels_of_depth(labels[:, :2], mask[:, :2, :2], 2).tolist() == [[-100, -100]]


@pytest.mark.parametrize("balancing", [pytest.param("aux_loss", marks=pytest.mark.slow), "global_aux_loss"])
def test_experts_checkpointing_and_compile(balancing: str) -> None:
    experts = MoEConfig(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        aux_loss_coeff=0.01,
        moe_router_load_balancing_type=balancing,
    )
    model, ids = _model(1, num_layers=1, moe=experts), token_ids(2, 12)
    found = []
    for activation_checkpointing in (False, True):
        model.activation_checkpointing = activation_checkpointing
        model.zero_grad()
        output = model(ids, labels=ids, return_logits=False)
        output.loss.backward()
        found.append([output.loss.detach(), *(p.grad.clone() for p in model.parameters())])
        counts = [m.expert_counts.clone() for m in model.modules() if hasattr(m, "expert_counts")]
        assert counts[-1].sum() == (1 + activation_checkpointing) * 2 * 11 * 2, "the last token has no successor"
    assert output.tokens_per_expert.shape[0] == model.config.num_layers + 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if balancing == "aux_loss")
    model.activation_checkpointing = False

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, return_logits=False).mtp_loss

    with torch.no_grad():
        expected = loss(ids)
        torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="eager")(ids), expected)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="mtp_num_layers is 17; allowed: 0 to 16"):
        tiny(mtp_num_layers=17)
    with pytest.raises(ConfigError, match=r"mtp_loss_scaling_factor is 0.0; allowed: above 0"):
        tiny(mtp_loss_scaling_factor=0.0)
