"""What TEModelForCausalLM is given beside tokens, or instead: caches, several texts in a row, embeddings."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="TEModelForCausalLM is a transformers model")
import transformers

from te_models.hf import TEModelForCausalLM
from te_models.hf.cache import CACHE
from tests.checkpoints.family_cases import CASES, make
from tests.te_models.hf_models import hf_model

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]])
"""Of three texts in two rows, and the first tokens of others."""


def both(case: str, folder: Path) -> tuple[Any, TEModelForCausalLM]:
    theirs = make(case) if case in CASES else hf_model(case)
    with warnings.catch_warnings(action="ignore"):
        theirs.save_pretrained(folder)
    return theirs, TEModelForCausalLM.from_pretrained(folder)


def prompt(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("case", ["gemma3", "gpt_oss", "mistral-window"])
def test_a_cache_that_keeps_only_what_windows_reach(case: str, tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    cache = lambda: transformers.DynamicCache(config=theirs.config)  # noqa: E731
    assert any(cache().is_sliding)
    expected = theirs.generate(prompt(), **SETTINGS)
    assert torch.equal(ours.generate(prompt(), **{CACHE: cache()}, **SETTINGS), expected)


@torch.no_grad()
def test_a_cache_that_drops_what_a_layer_sees_is_refused(tmp_path: Path) -> None:
    windows, _ = both("mistral-window", tmp_path / "a")
    _, ours = both("llama", tmp_path / "b")
    cache = transformers.DynamicCache(config=windows.config)
    ours(prompt(), past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"layer 0 of the DynamicCache keeps 4 of the 11 positions .* allowed: Dynamic"
    ):
        ours(prompt(2, 1), past_key_values=cache)


def test_new_tokens_alone_cannot_fill_a_cache_anew(tmp_path: Path) -> None:
    """Which frequencies that change with the length ask for: what is in the cache has to be given, too."""
    _, ours = both("phi3-longrope-window", tmp_path)
    original = ours.gpt.decoder.rotary_embeddings[0].original_length
    cache, begin = transformers.DynamicCache(), prompt(1, original - 2)
    first = ours.generate(begin, **{CACHE: cache}, **(SETTINGS | {"max_new_tokens": 2}))
    new = torch.cat((first[:, -1:], prompt(1, 4)), dim=1)
    mask = torch.ones(1, original + 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="reset it and give all tokens again"):
        ours.generate(new, attention_mask=mask, **{CACHE: cache}, **SETTINGS)
    whole = torch.cat((first, new[:, 1:]), dim=1)
    expected = ours.generate(whole, use_cache=False, **SETTINGS)
    assert torch.equal(ours.generate(whole, **{CACHE: cache}, **SETTINGS), expected)


@torch.no_grad()
def test_tokens_that_are_taken_back_leave_no_frequencies_behind(tmp_path: Path) -> None:
    """As assisted generation does with what it has tried: the cache was filled for a longer text."""
    _, ours = both("phi3-longrope-window", tmp_path)
    original = ours.gpt.decoder.rotary_embeddings[0].original_length
    cache, ids = transformers.DynamicCache(), prompt(1, original + 3)
    for kept, tried in ((-5, 1), (-4, -4), (-3, 3), (-2, -2)):
        kept, tried = original + kept, original + tried
        given = ids[:, :tried]
        inputs = ours.prepare_inputs_for_generation(
            given,
            next_sequence_length=tried - cache.get_seq_length(),
            past_key_values=cache,
            attention_mask=torch.ones_like(given),
        )
        logits = ours(**inputs).logits[:, -1]
        torch.testing.assert_close(logits, ours(given).logits[:, -1], rtol=1e-4, atol=1e-5)
        if kept < tried:
            cache.crop(kept - tried)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"])
@torch.no_grad()
def test_positions_that_begin_anew_begin_another_text(case: str, tmp_path: Path) -> None:
    """Each text as if it were alone. In transformers, too, but for two families that pass no positions on."""
    theirs, ours = both(case, tmp_path)
    got = ours(prompt(), position_ids=POSITIONS).logits
    for row, begin, end in ((0, 0, 8), (0, 8, 11), (1, 0, 3), (1, 3, 8), (1, 8, 11)):
        alone = ours(prompt()[row : row + 1, begin:end]).logits
        torch.testing.assert_close(got[row : row + 1, begin:end], alone, rtol=1e-4, atol=2e-5)
    if case not in ("gpt_oss", "llama4"):
        for positions in (POSITIONS, POSITIONS[1:]):
            expected = theirs(prompt(), position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(ours(prompt(), position_ids=positions).logits, expected, rtol=1e-4, atol=2e-5)
    assert torch.equal(ours(prompt(), position_ids=torch.arange(11)[None]).logits, ours(prompt()).logits)
    with pytest.raises(ValueError, match="position_ids has shape"):
        ours(prompt(), position_ids=POSITIONS[[0, 0, 0]])


@torch.no_grad()
def test_texts_in_a_row_never_see_each_other(tmp_path: Path) -> None:
    """Beside a mask without padding, with padding, and with a cache that tokens of the last text continue."""
    _, ours = both("llama", tmp_path)
    ids, ones = prompt(), torch.ones(2, 11, dtype=torch.int64)
    expected = ours(ids, position_ids=POSITIONS).logits
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(ours(ids, attention_mask=ones, position_ids=POSITIONS).logits, expected, **close)
    filled = torch.cat((ids.new_full((2, 3), 7), ids), dim=1)
    positions = torch.cat((torch.ones(2, 3, dtype=torch.int64), POSITIONS), dim=1)
    mask = torch.cat((torch.zeros(2, 3, dtype=torch.int64), ones), dim=1)
    got = ours(filled, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(got, expected, **close)
    for cut in (3, 8, 9, 10):  # where a text ends, begins, and goes on
        for mask in (None, ones):
            cache, parts = transformers.DynamicCache(), []
            for now in (slice(0, cut), slice(cut, 11)):
                part_mask = None if mask is None else mask[:, : now.stop]
                given = {"attention_mask": part_mask, "position_ids": POSITIONS[:, now], CACHE: cache}
                parts.append(ours(ids[:, now], use_cache=True, **given).logits)
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, **close)


@pytest.mark.slow
@torch.no_grad()
def test_texts_in_a_row_compile_to_one_graph(tmp_path: Path) -> None:
    _, ours = both("gemma3", tmp_path)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    for positions in (POSITIONS, torch.arange(11).expand(2, -1)):
        expected = ours(prompt(), position_ids=positions).logits
        torch.testing.assert_close(compiled(prompt(), position_ids=positions).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_moe"])
@torch.no_grad()
def test_a_loop_of_ones_own_goes_on_from_the_cache(case: str, tmp_path: Path) -> None:
    """Which every call returns that does not say otherwise, as in transformers: None in its place would be taken for
    the beginning of a text, silently."""
    theirs, ours = both(case, tmp_path)
    found = []
    for model in (theirs, ours):
        step, cache = prompt(), None
        for _ in range(4):
            output = model(step, **{CACHE: cache})
            step, cache = output.logits[:, -1:].argmax(dim=-1), output[CACHE]
        assert cache.get_seq_length() == 14
        found.append(step)
    assert torch.equal(*found)
    loaded = TEModelForCausalLM.from_pretrained(tmp_path, use_cache=False)
    assert loaded.config.use_cache is False and loaded(prompt()).past_key_values is None


@pytest.mark.sentinels("gemma3", "qwen3_moe")
@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt2", "qwen3_moe", "granite"])
@torch.no_grad()
def test_embeddings_in_place_of_tokens(case: str, tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    embed = [model.get_input_embeddings() for model in (theirs, ours)]
    assert torch.equal(ours(inputs_embeds=embed[1](prompt())).logits, ours(prompt()).logits)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :4] = 0
    for options in ({"attention_mask": mask}, {"num_beams": 3}):
        expected, got = (
            model.generate(inputs_embeds=e(prompt()), **SETTINGS, **options)
            for model, e in zip((theirs, ours), embed, strict=True)
        )
        assert torch.equal(got, expected) and got.shape == (2, 12)


@torch.no_grad()
def test_a_call_without_tokens_says_what_is_missing(tmp_path: Path) -> None:
    _, ours = both("llama", tmp_path)
    with pytest.raises(ValueError, match="the prompt has no tokens; allowed: at least one"):
        ours.generate(torch.zeros(1, 0, dtype=torch.int64), **SETTINGS)
    values = ours.get_input_embeddings()(prompt())
    for arguments, message in (
        ({"input_ids": prompt()[0]}, r"input_ids has shape \(11,\); allowed: \[batch, sequence\]"),
        ({"input_ids": prompt(), "inputs_embeds": values}, "input_ids is given and inputs_embeds is given"),
        ({"inputs_embeds": values[0]}, r"inputs_embeds has shape \(11, 32\); allowed: \[batch, sequence, hidden\]"),
        ({"inputs_embeds": values[..., 1:]}, r"inputs_embeds has shape \(2, 11, 31\); allowed: .*, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(**arguments)
