"""Compressed keys: their definition, texts in one row, padding, and decoding."""

import pytest
import torch

from te_models import GPTModel, KVCache, generate
from te_models.config import AttentionConfig, CompressedConfig, ConfigError
from te_models.kernels.compressed_keys import compress, last_tokens
from te_models.layouts import Facts, check_layout_rules
from tests.build import ONE_KEY, VARIANTS, token_ids

BOUND = 1e-5


def build() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(VARIANTS["compressed"]).eval()


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= BOUND * expected.abs().max())


def padded() -> torch.Tensor:
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :5] = False
    return mask


@pytest.mark.parametrize("series", [1, 2])
def test_a_compressed_key_is_a_gated_sum(series: int) -> None:
    """Against loops over texts, keys and tokens."""
    rate, size, texts = 3, 4, torch.tensor([[0] * 7 + [1] * 8 + [-1] * 2, [-1] * 4 + [5] * 13])
    torch.manual_seed(0)
    rows, bias = torch.randn(2, 17, 2 * series * size), torch.randn(rate, series * size)
    ends, before = last_tokens(17, rate, texts, rows.device)
    got = compress(rows, bias, ends, before, rate, series)
    keys, gates = rows.chunk(2, -1)
    for row in range(2):
        expected = []
        for text in (t for t in texts[row].unique().tolist() if t >= 0):
            tokens = (texts[row] == text).nonzero()[:, 0].tolist()
            for end in range(rate - 1, len(tokens), rate):
                terms, logits = [], []
                for part in range(series):
                    first = end - rate + 1 - (series - 1 - part) * rate
                    for offset in range(rate) if first >= 0 else ():
                        channels = slice(part * size, (part + 1) * size)
                        terms.append(keys[row, tokens[first + offset], channels])
                        logits.append(gates[row, tokens[first + offset], channels] + bias[offset, channels])
                expected.append((torch.stack(terms) * torch.stack(logits).softmax(0)).sum(0))
        assert torch.allclose(got[row, : len(expected)], torch.stack(expected), rtol=1e-5, atol=1e-6)
        assert (ends[row, len(expected) :] >= 17).all()


@torch.no_grad()
def test_texts_in_a_row_are_those_of_rows_apart() -> None:
    model, ids = build(), token_ids(1, 23)
    expected = torch.cat([model(part).logits for part in ids.split([9, 14], dim=1)], 1)
    documents = (torch.arange(23) >= 9).long()[None]
    positions = torch.cat((torch.arange(9), torch.arange(14)))[None]
    mask = documents[..., None] == documents[:, None]
    assert close(model(ids, document_ids=documents).logits, expected)
    assert close(model(ids, document_ids=documents, position_ids=positions).logits, expected)
    assert close(model(ids, attention_mask=mask).logits, expected)


@torch.no_grad()
def test_padding_on_the_left_changes_nothing() -> None:
    model, ids, mask = build(), token_ids(2, 11), padded()
    alone = generate(model, ids[:1, 5:], 9)
    both = generate(model, ids, 9, attention_mask=mask)
    assert torch.equal(both[:1, 11:], alone[:, 6:]) and torch.equal(both[1:], generate(model, ids[1:], 9))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_gives_the_same_text() -> None:
    model, ids, mask = build(), token_ids(2, 11), padded()
    expected = generate(model, ids, 9, attention_mask=mask)
    assert torch.equal(generate(model, ids, 9, attention_mask=mask, compile=True), expected)


@torch.no_grad()
@pytest.mark.parametrize("parts", [[1] * 23, [20, 1, 2], [3, 9, 11]])
def test_any_division_of_a_text_gives_the_same(parts: list[int]) -> None:
    model, ids = build(), token_ids(2, 23)
    cache = KVCache(model.config, batch_size=2, max_length=23)
    got = torch.cat([model(part, cache=cache).logits for part in ids.split(parts, dim=1)], 1)
    assert close(got, model(ids).logits)
    cache.crop(17)  # a rejected draft
    assert close(model(ids[:, 17:], cache=cache).logits, model(ids).logits[:, 17:])


def test_what_is_refused() -> None:
    model = build()
    with pytest.raises(ConfigError, match="compressed: a model with it, of one key head, cannot be split over 2"):
        check_layout_rules(Facts(model=model.config, tp=2, etp=2))
    compressed = CompressedConfig(q_lora_rank=8, o_groups=2, o_lora_rank=4)
    for change, message in (
        ({"num_query_groups": 2}, "null without key_is_value, one query group"),
        ({"window_size": None}, "null without key_is_value, one query group"),
        ({"softcap": 3.0}, "null with other elements of attention"),
        ({"add_output_bias": True}, "null with other elements of attention"),
    ):
        with pytest.raises(ConfigError, match=message):
            AttentionConfig(**ONE_KEY | change, compressed=compressed)
    with pytest.raises(ConfigError, match=r"compressed.o_groups is 3; allowed: a divisor of 4 heads"):
        AttentionConfig(**ONE_KEY, compressed=compressed.replace(o_groups=3))
    with pytest.raises(ConfigError, match=r"compressed.rate is None; allowed: a number with overlap or index_topk"):
        compressed.replace(overlap=True)
    with pytest.raises(ConfigError, match=r"moe.hash_layers is \(5,\); allowed: some of"):
        model.config.replace(moe=model.config.moe.replace(hash_layers=(5,)))
    with pytest.raises(ConfigError, match="null without a rope of style 'interleaved'"):
        model.config.replace(rope=model.config.rope.replace(style="half"))
    with pytest.raises(ConfigError, match=r"layer_types\[1\] is 'full'; allowed: 'sliding'"):
        model.config.replace(layer_types=("full",) * 3)
    with pytest.raises(ValueError, match="layers read the tokens"):
        model(inputs_embeds=model.embedding.word_embeddings(token_ids(1, 4)))
    with pytest.raises(ConfigError, match=r"moe.hash_layers: .*cannot be cut into stages"):
        model.stage(0, 1)
