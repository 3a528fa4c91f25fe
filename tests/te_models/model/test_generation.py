"""Generation: greedy text equals transformers', a cache changes nothing, sampling follows its options and seed."""

from pathlib import Path

import pytest
import torch

from te_models import GPTModel, KVCache, generate, stream
from te_models.generation import filter_logits
from tests.build import VARIANTS
from tests.compare import refused
from tests.te_models.hf_models import hf_model, token_ids

NO_END = -1


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a case's name to (their model, ours)."""
    known: dict = {}

    def pair(name: str):
        if name not in known:
            folder: Path = tmp_path_factory.mktemp("model")
            theirs = hf_model(name)
            theirs.save_pretrained(folder)
            known[name] = theirs, GPTModel.from_pretrained(folder).eval()
        return known[name]

    return pair


def their_text(model, ids: torch.Tensor, new: int, mask: torch.Tensor | None = None, end: int = NO_END) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=end, pad_token_id=0
    )


@pytest.mark.sentinels("llama-rope-llama3", "mistral-window", "mixtral")
@pytest.mark.parametrize(
    "name", ["llama", "llama-rope-llama3", "mistral-window", "qwen2-window", "qwen3_moe", "mixtral"]
)
def test_greedy_equals_transformers(pairs, name: str) -> None:
    theirs, ours = pairs(name)
    ids = token_ids(2, 9)
    assert torch.equal(generate(ours, ids, 24), their_text(theirs, ids, 24))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3_moe"])
def test_left_padded_prompts_get_the_text_they_get_alone(pairs, name: str) -> None:
    theirs, ours = pairs(name)
    ids = token_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :2] = 0
    together = generate(ours, ids, 16, attention_mask=mask)
    assert torch.equal(together, their_text(theirs, ids, 16, mask))
    for row, begin in ((0, 7), (1, 2), (2, 0)):
        alone = generate(ours, ids[row : row + 1, begin:], 16)
        assert torch.equal(together[row, begin:], alone[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window"])
def test_logits_with_a_cache_equal_logits_without(pairs, name: str) -> None:
    _, ours = pairs(name)
    ids = token_ids(2, 20)
    expected = ours(ids).logits
    cache = KVCache(ours.config, 2, 20)
    pieces, begin = [], 0
    for size in (1, 6, 1, 9, 3):
        pieces.append(ours(ids[:, begin : begin + size], cache=cache).logits)
        begin += size
    assert (torch.cat(pieces, dim=1) - expected).abs().max() <= 1e-5 * expected.abs().max()
    cache.reset()
    again = ours(ids[:, :5], cache=cache).logits
    assert (again - expected[:, :5]).abs().max() <= 1e-5 * expected.abs().max()


def test_a_row_stops_at_its_end_and_is_padded(pairs) -> None:
    theirs, ours = pairs("llama")
    ids = token_ids(2, 9)
    free = generate(ours, ids, 12)
    end = free[0, 9 + 4].item()  # row 0 says this as its fifth token at the latest
    got = generate(ours, ids, 12, eos_token_id=end, pad_token_id=0)
    assert torch.equal(got, their_text(theirs, ids, 12, end=end))
    new = got[0, 9:].tolist()
    assert new.index(end) <= 4 and set(new[new.index(end) + 1 :]) <= {0}
    assert generate(ours, ids[:1], 12, eos_token_id=(end, 96)).shape[1] < 9 + 12


def test_streaming_yields_the_same_tokens(pairs) -> None:
    _, ours = pairs("llama")
    ids = token_ids(2, 9)
    tokens = stream(ours, ids, 6)
    first = next(tokens)
    assert first.shape == (2,)
    assert torch.equal(torch.stack([first, *tokens], dim=1), generate(ours, ids, 6)[:, 9:])


def test_sampling_is_decided_by_the_seed(pairs) -> None:
    _, ours = pairs("llama")
    ids = token_ids(2, 9)
    one, same, other = (generate(ours, ids, 20, temperature=1.5, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    state = torch.get_rng_state()
    generate(ours, ids, 3, temperature=1.0, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_among_one_token_is_greedy(pairs) -> None:
    _, ours = pairs("llama")
    ids = token_ids(2, 9)
    greedy = generate(ours, ids, 10)
    assert torch.equal(generate(ours, ids, 10, temperature=2.0, top_k=1, seed=0), greedy)
    assert torch.equal(generate(ours, ids, 10, temperature=2.0, top_p=1e-6, seed=0), greedy)


def test_sampling_frequencies_follow_the_probabilities() -> None:
    """A model is not needed to check the sampler: 20000 rows of the same logits."""
    from te_models.generation import Sampler

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    sampler = Sampler(0.5, 3, None, torch.Generator().manual_seed(0))
    counts = torch.bincount(sampler(logits), minlength=4) / 20_000
    expected = torch.softmax(torch.tensor([4.0, 2.0, 0.0]), dim=0)
    # Four standard deviations of a frequency over 20000 draws.
    assert (counts[:3] - expected).abs().max() < 4 * (0.25 / 20_000) ** 0.5 and counts[3] == 0


def test_filters() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))

    def kept(**options) -> list[int]:
        return filter_logits(logits, **options)[0].isfinite().nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3] and kept(top_k=2) == [1, 3]
    assert kept(top_k=9) == [0, 1, 2, 3] and kept(top_p=0.3) == [1]
    assert kept(top_p=0.5) == [1, 3] and kept(top_p=0.75) == [1, 2, 3]
    assert kept(top_k=2, top_p=0.99) == [1, 3]  # the probabilities are those among the two
    assert kept(top_p=1.0) == [0, 1, 2, 3]
    ties = torch.zeros(1, 5)
    assert filter_logits(ties, top_k=2)[0].isfinite().tolist() == [True, True, False, False, False]


def test_generation_restores_the_training_mode(pairs) -> None:
    _, ours = pairs("llama")
    ours.train()
    try:
        tokens = stream(ours, token_ids(1, 4), 3)
        next(tokens)
        tokens.close()
        assert ours.training
        frozen = ours.decoder.layers[0]
        frozen.eval()
        generate(ours, token_ids(1, 4), 1)
        assert ours.training and not any(module.training for module in frozen.modules()), "each module its own mode"
    finally:
        ours.eval()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask has shape"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "pad prompts on the left"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "input_ids has shape"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, "input_ids has shape"),
    ],
)
def test_impossible_arguments_are_refused_at_once(pairs, arguments: dict, says: str) -> None:
    _, ours = pairs("llama")
    refused(lambda: stream(ours, **{"input_ids": token_ids(1, 4), "max_new_tokens": 2, **arguments}), says)


def test_text_beyond_the_learned_positions_is_refused_at_once() -> None:
    ours = GPTModel(VARIANTS["learned_positions"]).eval()
    ids = token_ids(1, 60) % ours.config.vocab_size
    assert generate(ours, ids, 5).shape == (1, 65)  # the last of 64 positions gives the last token
    with pytest.raises(ValueError, match=r"max_new_tokens is 6 after 60 tokens; allowed: up to 5, .* 64 positions"):
        stream(ours, ids, 6)
    whole = torch.cat((ids, ids[:, :6]), dim=1)
    refused(lambda: stream(ours, whole, 1), "a prompt has 66 tokens; allowed: up to 64")
    with pytest.raises(IndexError, match=r"a token is at position 65; allowed: up to 63, .* learned 64 positions"):
        ours(whole)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.int64), ids), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    assert torch.equal(generate(ours, padded, 5, attention_mask=mask)[:, 4:], generate(ours, ids, 5))


def test_a_cache_that_does_not_fit_is_refused(pairs) -> None:
    _, ours = pairs("llama")
    cache = KVCache(ours.config, 1, 4)
    refused(lambda: ours(token_ids(1, 5), cache=cache), "room for 4 tokens and holds 0; 5 more")
    refused(lambda: ours(token_ids(2, 2), cache=cache), "for 1 sequences, the input has 2")
    refused(lambda: KVCache(ours.config, 0, 4), "at least 1")
    with pytest.raises(ValueError, match=r"holds torch\.float64, but the model computes in torch\.float32"):
        ours(token_ids(1, 2), cache=KVCache(ours.config, 1, 4, dtype=torch.float64))
    ours(token_ids(1, 2), cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1\); allowed: \[1, 3\]"):
        ours(token_ids(1, 1), cache=cache, attention_mask=torch.ones(1, 1))
