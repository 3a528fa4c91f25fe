"""Caches of bounded and of fixed size, compiled decoding and drafts: the same tokens as the plain loop gives."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from te_models import Draft, DraftModel, GPTModel, KVCache, MTPDraft, StaticKVCache, generate, stream
from te_models.generation import Sampler, compiled
from te_models.generation.speculative import _checked
from te_models.model.cache.kv_cache import SLACK
from tests.build import VARIANTS, VOCAB, heads, tiny, token_ids
from tests.compare import refused

KINDS = ("mixed_layers",)
DEARER = ("chunked_l2_temperature", "dense", "sinks_clip", "softcaps", "latent", "moe", "dynamic_rope")


def model_of(name: str, seed: int = 0, **changes: Any) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(VARIANTS[name].replace(**changes)).eval()


def padded(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of several lengths."""
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, :4] = False
    return token_ids(rows, length), mask


def without_a_cache(model: GPTModel, ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    for _ in range(new):
        position_ids = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=position_ids).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(dim=-1)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return ids


@pytest.mark.parametrize("name", ["window", "mixed_layers", "chunked_l2_temperature"])
def test_a_bounded_cache_gives_the_tokens_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.model.cache.kv_cache.SLACK", 3)  # buffers are moved again and again
    model = model_of(name)
    ids, mask = padded(2, 9)
    assert torch.equal(generate(model, ids, 16, attention_mask=mask), without_a_cache(model, ids, mask, 16))


@torch.no_grad()
@pytest.mark.parametrize("name", ["window", "chunked_l2_temperature"])
def test_pieces_of_any_size_pass_a_bounded_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.model.cache.kv_cache.SLACK", 4)
    model, ids = model_of(name), token_ids(2, 33)
    expected, cache, begin, pieces = model(ids).logits, KVCache(model.config, 2, 33), 0, []
    for size in (2, 1, 7, 1, 1, 1, 12, 5, 3):
        pieces.append(model(ids[:, begin : begin + size], cache=cache).logits)
        begin += size
    assert (torch.cat(pieces, dim=1) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_bytes_of_bounded_layers_do_not_grow_with_the_text() -> None:
    window, chunked = VARIANTS["window"], VARIANTS["chunked_l2_temperature"]
    for config, reach in ((window, 2), (chunked.replace(layer_types=("chunked", "chunked")), 2)):
        heads = config.attention.num_query_groups
        row = 2 * config.num_layers * heads * config.attention.kv_channels * 4  # of a position, float32
        sizes = [KVCache(config, 1, length).nbytes for length in (10, 1_000, 100_000)]
        assert sizes == [row * 10, row * (reach + SLACK), row * (reach + SLACK)]
        assert StaticKVCache(config, 1, 100_000).layers[0].key.shape[1] == reach + 1
    assert KVCache(tiny(), 1, 1_000).nbytes == 100 * KVCache(tiny(), 1, 10).nbytes


@torch.no_grad()
def test_positions_are_taken_back_wherever_the_buffer_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.model.cache.kv_cache.SLACK", 3)
    model, ids = model_of("window"), token_ids(1, 32)
    expected, cache = model(ids).logits, KVCache(model.config, 1, 64, rollback=3)
    for begin in range(28):  # four tokens are tried, one of them stays
        tried = model(ids[:, begin : begin + 4], cache=cache).logits
        assert (tried - expected[:, begin : begin + 4]).abs().max() <= 1e-5 * expected.abs().max()
        cache.crop(begin + 1)


@torch.no_grad()
def test_what_cannot_be_taken_back_is_refused() -> None:
    model, ids = model_of("window"), token_ids(1, 12)
    cache = KVCache(model.config, 1, 300, rollback=4)
    for _ in range(20):  # past the buffer
        model(ids, cache=cache)
    model(ids[:, :4], cache=cache)
    cache.crop(240)
    ahead = model(ids[:, :3], cache=cache).logits
    fresh = KVCache(model.config, 1, 300)
    for _ in range(20):
        model(ids, cache=fresh)
    assert torch.equal(ahead, model(ids[:, :3], cache=fresh).logits)
    with pytest.raises(ValueError, match=r"layer 0 has dropped positions that are in reach of position 9; .* up to 4 "):
        cache.crop(9)
    refused(lambda: cache.crop(244), "length is 244; allowed: 0 to the 243 tokens")


def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Trace the step as for the compiler, run what was traced, and count."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "backend_for", lambda model: counter)
    return counter


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in DEARER)])
def test_one_graph_decodes_every_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    graphs = eager_graphs(monkeypatch)
    ids, mask = padded(2, 9)
    got = generate(model, ids, 14, attention_mask=mask, compile=True)
    assert torch.equal(got, generate(model, ids, 14, attention_mask=mask)) and graphs.frame_count == 1
    generate(model, ids[:, 3:], 8, compile=True)  # a text of another length finds the graph
    assert graphs.frame_count == 1


def test_models_and_batches_do_not_share_the_limit_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = eager_graphs(monkeypatch)
    monkeypatch.setattr("te_models.compile.compile_model.GRAPHS", 1)
    with torch._dynamo.config.patch(recompile_limit=1):
        for model, rows in ((model_of("dense"), 1), (model_of("dense", num_layers=1), 1), (model_of("dense", 1), 2)):
            assert torch.equal(
                generate(model, token_ids(rows, 5), 3, compile=True), generate(model, token_ids(rows, 5), 3)
            )
    assert graphs.frame_count == 3


def test_texts_of_all_lengths_share_a_handful_of_graphs() -> None:
    lengths = [compiled.static_length(tokens) for tokens in range(1, 8193)]
    assert all(tokens <= slots <= max(64, 1.5 * tokens) for tokens, slots in enumerate(lengths, 1))
    assert lengths == sorted(lengths) and len({*lengths}) == 15


@pytest.mark.slow
def test_the_compiler_gives_the_same_tokens() -> None:
    model = model_of("mixed_layers")
    ids, mask = padded(2, 9)
    text = generate(model, ids, 8, attention_mask=mask, compile=True)
    assert torch.equal(text, generate(model, ids, 8, attention_mask=mask))


def test_a_static_cache_says_what_it_does_not_take() -> None:
    model, ids = model_of("dense"), token_ids(1, 5)
    cache = StaticKVCache(model.config, 1, 8)
    refused(lambda: model(token_ids(1, 9), cache=cache), "room for 8 tokens; 9 do not fit")
    model(ids, cache=cache)
    refused(lambda: model(ids[:, :1], cache=cache), "holds 5 tokens; allowed for more: its `step`")
    refused(lambda: model(ids[:, :2], cache=cache.step), "has 2 tokens per row; allowed behind a prompt")


@torch.no_grad()
def test_a_static_cache_that_is_full_takes_no_token() -> None:
    model, ids = model_of("dense"), token_ids(1, 4)
    cache = StaticKVCache(model.config, 1, 5)
    model(ids, cache=cache)
    for position in (4, 5):
        with nullcontext() if position == 4 else pytest.raises(RuntimeError, match="room for 5 tokens and is full"):
            model(ids[:, :1], position_ids=torch.tensor([[position]]), cache=cache.step)
        cache.step.position.add_(1)


@pytest.mark.sentinels("window", "moe")
@pytest.mark.parametrize("name", ["dense", "window", "latent", "moe"])
def test_a_draft_changes_no_greedy_text(name: str) -> None:
    """Drafts of another model are rejected, of the model itself kept, and one that errs now and then is both."""
    model = model_of(name)
    ids = token_ids(1, 7)
    expected = generate(model, ids, 20)
    rates = []
    for seed, noise in ((0, 0.0), (0, 0.02), (1, 0.0)):
        small = model_of(name, seed)
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        draft = DraftModel(small)
        assert torch.equal(generate(model, ids, 20, draft_model=draft, num_draft_tokens=3), expected)
        rates.append(draft.acceptance_rate)
    assert rates[0] == 1.0 and rates[2] < 1.0


def test_a_draft_ends_where_the_text_ends_and_modes_come_back() -> None:
    model, small, ids = model_of("dense").train(), model_of("dense", 1).train(), token_ids(1, 7)
    end = int(generate(model, ids, 12)[0, 12])
    assert torch.equal(
        generate(model, ids, 12, eos_token_id=end, draft_model=small), generate(model, ids, 12, eos_token_id=end)
    )
    assert model.training and small.training


def test_the_rejection_rule_draws_from_the_models_distribution() -> None:
    """The first token that comes out, over 2000 proposals of a distribution that differs from the wanted one."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    sampler = Sampler(1.0, generator=torch.Generator().manual_seed(0))
    counts, draws, stayed = torch.zeros(4), 2000, 0
    for _ in range(draws):
        proposed = sampler.draw(q)
        accepted, last = _checked(proposed, q, p, sampler)
        stayed += accepted
        counts[int(proposed) if accepted else int(last)] += 1
    deviation = (p[0] * (1 - p[0]) / draws).sqrt()
    assert ((counts / draws - p[0]).abs() <= 4 * deviation).all()
    assert abs(stayed / draws - float(torch.minimum(p[0], q[0]).sum())) < 4 * 0.5 / draws**0.5


def test_samples_with_a_draft_follow_the_model() -> None:
    """The frequencies of the second token, which a draft proposes, against its exact distribution."""
    config = tiny(num_layers=1, vocab_size=5, init_method_std=0.3)
    torch.manual_seed(0)
    model, small = GPTModel(config).eval(), GPTModel(config).eval()
    ids, draws = token_ids(1, 3) % 5, 200
    with torch.no_grad():
        first = torch.softmax(model(ids).logits[0, -1], -1)
        rows = torch.cat((ids.expand(5, -1), torch.arange(5)[:, None]), dim=1)
        exact = first @ torch.softmax(model(rows).logits[:, -1], -1)
    counts = torch.zeros(5)
    draft = DraftModel(small)
    for seed in range(draws):
        text = generate(model, ids, 3, temperature=1.0, seed=seed, draft_model=draft, num_draft_tokens=2)
        counts[text[0, 4]] += 1
    assert 0 < draft.acceptance_rate < 1
    assert ((counts / draws - exact).abs() <= 4 * (exact * (1 - exact) / draws).sqrt()).all()


class LastStates(Draft):
    """As a head that predicts further tokens: repeats a token, and looks at what states it is given."""

    needs_hidden_states = True

    def begin(self, model: GPTModel, max_length: int) -> None:
        self.model = model

    def propose(self, tokens, hidden_states, count, sampler):
        with torch.no_grad():
            expected = self.model(tokens[:, :-1], return_hidden_states=True).hidden_states[-1]
        assert (hidden_states - expected).abs().max() <= 1e-5 * expected.abs().max()
        chosen = tokens[0, -1:].expand(count)
        return chosen, torch.nn.functional.one_hot(chosen, VOCAB).float()


def test_heads_of_the_model_can_propose() -> None:
    model, ids, draft = model_of("window"), token_ids(1, 7), LastStates()
    assert torch.equal(generate(model, ids, 12, draft_model=draft), generate(model, ids, 12))
    assert draft.proposed > 0


def mtp_model(depths: int, name: str = "dense") -> GPTModel:
    return model_of(name, mtp_num_layers=depths)


@torch.no_grad()
@pytest.mark.parametrize("depths", [1, 2])
def test_depths_propose_what_they_are_trained_to_predict(depths: int) -> None:
    """Each call goes on from the one before, whose last tokens were rejected, and gives what the whole text gives."""
    model, draft, greedy = mtp_model(depths, "window"), MTPDraft(), Sampler(0.0)
    draft.begin(model, 40)
    text = token_ids(1, 20)
    for length, count in ((9, depths), (10, depths), (13, depths), (12, depths)):
        tokens = text[:, :length].clone()
        tokens[0, -1] = (tokens[0, -1] + count) % VOCAB if length == 12 else tokens[0, -1]
        states = model(tokens[:, :-1], return_hidden_states=True).hidden_states
        chosen, _ = draft.propose(tokens, states[-1], count, greedy)
        below, known = states[-1], torch.cat((tokens, chosen[None]), dim=1)
        inputs = model.decoder.layer_inputs(below, torch.arange(length - 1)[None], None)
        for depth, layer in enumerate(model.mtp.layers, 1):
            embedded = model.embedding(known[:, depth : depth + length - 1], None, None)
            below, *_ = layer(below, embedded, model.decoder, inputs)
            table = model.embedding.word_embeddings.weight if model.output_layer.weight is None else None
            logits, _, _ = model.output_layer(below[:, -1:], table, None, return_logits=True)
            assert int(logits.argmax()) == int(chosen[depth - 1]), (length, depth)


@pytest.mark.parametrize(("depths", "name"), [(1, "moe"), (2, "latent"), (1, "mixed_layers")])
def test_drafts_of_the_models_own_layers_change_no_greedy_text(depths: int, name: str) -> None:
    model, ids, draft = mtp_model(depths, name), token_ids(1, 7), MTPDraft()
    assert torch.equal(generate(model, ids, 16, draft_model=draft, num_draft_tokens=3), generate(model, ids, 16))
    assert draft.proposed > 0


def test_trained_depths_are_accepted() -> None:
    """On a text that repeats itself, of which the second of two proposed tokens goes on from the layer's own result."""
    model = GPTModel(tiny(num_layers=1, mtp_num_layers=1))
    ids = torch.arange(40).remainder(5)[None] + 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(ids, labels=ids, return_logits=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft = MTPDraft()
    text = generate(model.eval(), ids[:, :8], 20, draft_model=draft, num_draft_tokens=2)
    assert torch.equal(text, ids[:, :28]) and draft.acceptance_rate > 0.9


def test_a_model_without_depths_is_no_draft() -> None:
    with pytest.raises(ValueError, match=r"no layers that predict further tokens; allowed: .* mtp=True"):
        stream(model_of("dense"), token_ids(1, 4), 3, draft_model=MTPDraft())


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("dense", {"rows": 2}, "draft_model is given for 2 prompts; allowed: one prompt"),
        ("dense", {"compile": True}, "compile and draft_model are both given"),
        ("dense", {"num_draft_tokens": 0}, "num_draft_tokens is 0; allowed: 1 or more"),
        ("dense", {"vocab_size": 7}, "the draft model has 7 tokens; allowed: 61"),
        ("dynamic_rope", {}, "the model rotates by the length of the text"),
    ],
)
def test_what_a_draft_does_not_go_with_is_refused_at_once(name: str, options: dict[str, Any], says: str) -> None:
    small = GPTModel(tiny(vocab_size=options.pop("vocab_size", VOCAB)))
    refused(lambda: stream(model_of(name), token_ids(options.pop("rows", 1), 4), 3, draft_model=small, **options), says)


def test_grouped_queries_share_slots() -> None:
    config = tiny(attention=heads(1))
    assert StaticKVCache(config, 2, 6).layers[0].key.shape == (2, 6, 1, 8)
