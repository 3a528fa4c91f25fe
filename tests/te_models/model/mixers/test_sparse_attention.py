"""Models whose queries see the keys that an indexer chooses: of latent attention and of grouped queries."""

import pytest
import torch
from torch import Tensor

from te_models import DraftModel, GPTModel, ModelConfig, compile_model, generate
from te_models.checkpoints import expected_tensors
from te_models.config import AttentionConfig, ConfigError, IndexerConfig, MLAConfig
from te_models.kernels.sparse_attention import reference
from te_models.layers import MXFP8BlockScaling, autocast
from te_models.lora import add_lora
from te_models.lora.model import adapters_of
from te_models.model.flops import forward_flops_per_token
from te_models.model.mixers import sparse_attention as module
from te_models.model.mixers import train_indexers
from tests.build import LATENT, heads, tiny, token_ids
from tests.compare import assert_decodes, refused

INDEXER = IndexerConfig(n_heads=6, head_dim=9, topk=5, rope_style="interleaved", rotated="last")
MIXERS = ("attention", "shared", "attention", "shared", "shared")


def attention(kind: str, indexer: IndexerConfig | None) -> AttentionConfig:
    if kind == "grouped":
        return heads(kv_channels=8, indexer=indexer)
    mla = MLAConfig(**LATENT, q_lora_rank=12 if kind == "latent" else None)
    return heads(None, mla=mla, indexer=indexer)


def sparse(kind: str = "latent", indexer: IndexerConfig = INDEXER, **changes: object) -> ModelConfig:
    """Five layers, of which three share the choice of another one."""
    fields = {
        "num_layers": 5,
        "attention": attention(kind, indexer),
        "mixers": {"shared": attention(kind, IndexerConfig(topk=indexer.topk, shared=True))},
        "layer_mixers": MIXERS,
    }
    return tiny(**fields | changes)


def model_of(config: ModelConfig, seed: int = 0) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(config).eval()


def close(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None and b is not None
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


KINDS = ["latent", "latent_plain", "grouped"]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_layers_that_choose(kind: str) -> None:
    config = sparse(kind)
    model = model_of(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected_tensors(config)
    layers = {name.split(".")[2] for name, _ in model.named_parameters() if ".indexer." in name}
    assert layers == {"0", "2"} and ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_sees_the_best_keys_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the definition in place of the kernels, and not what dense attention computes."""
    model, ids = model_of(sparse(kind)), token_ids(2, 30)
    found = model(ids).logits

    def select(q: Tensor, k: Tensor, weights: Tensor, topk: int, hidden: Tensor | None) -> Tensor:
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1).expand(q.shape[0], -1, -1)
        return reference.selected(reference.index_scores(q, k, weights), later, topk)

    def attend(q: Tensor, k: Tensor, v: Tensor, choice: Tensor, *, scale: float) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        return reference.sparse_attention(q, k, v, choice, scale)

    monkeypatch.setattr(module, "select_keys", select)
    monkeypatch.setattr(module, "sparse_attention", attend)
    close(found, model(ids).logits)
    dense = model_of(sparse(kind, INDEXER.replace(topk=64)))
    dense.load_state_dict(model.state_dict())
    assert (dense(ids).logits - found).abs().max() > 1e-2 * found.abs().max()
    without = model_of(tiny(num_layers=5, attention=attention(kind, None)))
    names = {n: n for n in without.state_dict()} | {
        n: n.replace("self_attention.linear_qkv_down.layer_norm_", "input_layernorm.").replace(
            "self_attention.linear_qkv.layer_norm_", "input_layernorm."
        )
        for n in without.state_dict()
        if ".0.self" in n or ".2.self" in n
    }
    whole = dense.state_dict()
    without.load_state_dict({n: whole[names[n]] for n in names})
    close(dense(ids).logits, without(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_keeps_index_keys_beside_the_others(kind: str) -> None:
    assert_decodes(model_of(sparse(kind)), token_ids(2, 17), prompt=9)


@torch.no_grad()
def test_generation_in_batches_and_with_drafts() -> None:
    model, ids = model_of(sparse()), token_ids(2, 9)
    wanted = generate(model, ids, 10)
    for t in range(9, 19):
        assert torch.equal(model(wanted[:, :t]).logits[:, -1].argmax(-1), wanted[:, t])
    drafted = generate(model, ids[:1], 10, draft_model=DraftModel(model_of(sparse(), 1)))
    assert torch.equal(drafted, wanted[:1])
    padded = torch.cat((torch.zeros(1, 3, dtype=ids.dtype), ids[:1]), 1)
    mask = torch.ones_like(padded).index_fill(1, torch.arange(3), 0)
    assert torch.equal(generate(model, padded, 10, attention_mask=mask)[:, 3:], wanted[:1])


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_decodes() -> None:
    model, ids = model_of(sparse()), token_ids(2, 9)
    assert torch.equal(generate(model, ids, 10, compile=True), generate(model, ids, 10))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_as_each_by_itself(kind: str) -> None:
    model, ids = model_of(sparse(kind)).train(), token_ids(1, 40)
    documents = torch.tensor([[0] * 13 + [1] * 20 + [2] * 3 + [-1] * 4])
    positions = torch.cat([torch.arange(n) for n in (13, 20, 3, 4)])[None]
    packed = model(ids, document_ids=documents, position_ids=positions).logits
    mask = (documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, :, None]
    masked = model(ids, attention_mask=mask, position_ids=positions).logits
    for begin, end in ((0, 13), (13, 33), (33, 36)):
        alone = model(ids[:, begin:end]).logits
        close(packed[:, begin:end], alone)
        close(masked[:, begin:end], alone)


@pytest.mark.parametrize("kind", ["latent", "grouped"])
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warm-up"])
def test_its_own_loss_trains_the_indexer_and_nothing_else(kind: str, warmup: bool) -> None:
    ids = token_ids(2, 30)
    plain, model = (
        model_of(sparse(kind, INDEXER.replace(loss_coeff=c, warmup=warmup and c > 0))).train() for c in (0.0, 0.5)
    )
    outputs = [m(ids, labels=ids) for m in (plain, model)]
    for output in outputs:
        output.loss.backward()
    loss = outputs[1].aux_loss
    assert outputs[0].aux_loss is None and loss > 0
    close(outputs[1].loss - loss, (model if warmup else plain)(ids, labels=ids).loss - (loss if warmup else 0.0))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if ".indexer." in name:
            assert q.grad is None and p.grad.abs().sum() > 0, name
        elif not warmup:
            assert torch.equal(p.grad, q.grad), name
    assert model.eval()(ids, labels=ids).aux_loss is None
    close(model(ids).logits, plain.eval()(ids).logits)
    again = model_of(model.config).train()
    again.decoder.activation_checkpointing = True
    output = again(ids, labels=ids)
    output.loss.backward()
    close(output.loss, outputs[1].loss)
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_layer_that_shares_is_with_the_one_that_chose() -> None:
    model = model_of(sparse())
    stages = [model.stage(0, 2), model.stage(2, 5)]
    ids = token_ids(1, 20)
    x = stages[0](ids, return_hidden_states=True).hidden_states[-1]
    close(stages[1](inputs_embeds=x).logits, model(ids).logits)
    with pytest.raises(ConfigError, match="layer 1, which shares the choice of keys of layer 0; allowed"):
        model.stage(1, 5)
    with pytest.raises(ConfigError, match=r"mixers.shared.indexer.shared is True; allowed: false in layer 0, before"):
        sparse(layer_mixers=("shared", *MIXERS[:4]))
    refused(lambda: sparse(mtp_num_layers=1), "false in the last layer with mtp_num_layers", error=ConfigError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: INDEXER.replace(topk=0), "indexer.topk is 0; allowed: a positive integer"),
        (lambda: INDEXER.replace(loss_coeff=-1.0), "indexer.loss_coeff is -1.0; allowed: zero or"),
        (lambda: IndexerConfig(shared=True, loss_coeff=1.0), "indexer.shared is True; allowed: false with loss_coeff"),
        (
            lambda: attention("grouped", INDEXER).replace(sinks=True),
            "attention.indexer is .*; allowed: null with window_size, chunk_size, softcap, sinks",
        ),
        (lambda: sparse("grouped", INDEXER.replace(head_dim=6)), "attention.indexer.head_dim is 6; allowed: at least"),
    ],
)
def test_what_cannot_be_is_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_flops_grow_with_the_chosen_keys_alone() -> None:
    """And with the indexer's scores, in the two layers that have one."""
    config = sparse(indexer=INDEXER.replace(topk=100))
    ten, twenty = (forward_flops_per_token(config, n) for n in (10_000, 20_000))
    assert twenty - ten == 2 * 2 * INDEXER.n_heads * INDEXER.head_dim * 5_000


def test_an_indexer_without_a_loss_stays_as_it_is() -> None:
    """Weight decay would move it, and adapters of it would learn nothing."""
    refused(lambda: train_indexers(model_of(tiny()), 1.0), "the model has no indexers; allowed")
    plain, trained = (model_of(sparse(indexer=INDEXER.replace(loss_coeff=c))) for c in (0.0, 1.0))
    for model, learns in ((plain, False), (trained, True)):
        assert {p.requires_grad for n, p in model.named_parameters() if ".indexer." in n} == {learns}
        train_indexers(model, 0.5, warmup=True)
        assert all(p.requires_grad for p in model.parameters())
        train_indexers(model, float(learns))
        add_lora(model, rank=2)
        assert any(".indexer." in name for name, _ in adapters_of(model)) is learns


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_projections_run_under_a_recipe(compiled: bool) -> None:
    mla = MLAConfig(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=32, v_head_dim=32)
    indexer = INDEXER.replace(n_heads=8, head_dim=32, topk=8, loss_coeff=0.1)
    config = tiny(hidden_size=64, attention=AttentionConfig(num_attention_heads=2, mla=mla, indexer=indexer))
    ids, losses = token_ids(1, 32), []
    for recipe in (None, MXFP8BlockScaling()):
        model = model_of(config).train()
        if compiled:
            compile_model(model)
        with autocast(enabled=recipe is not None, recipe=recipe):
            output = model(ids, labels=ids)
        output.loss.backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
        losses.append(output.aux_loss)
    assert not torch.equal(*losses) and (losses[1] - losses[0]).abs() < 0.2 * losses[0]
