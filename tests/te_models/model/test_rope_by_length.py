"""Generation with rotary frequencies that depend on the length: a cache changes nothing, also where they change."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, KVCache, generate
from te_models.hf import TEModelForCausalLM
from tests.checkpoints.family_cases import make
from tests.te_models.hf_models import hf_model

CASES = {"phi3-longrope-window": (make, 10, 16), "llama-rope-dynamic": (hf_model, 59, 64)}
"""Case -> what makes it, the prompt's length, the length up to which the frequencies are those of short sequences."""
NEW = 12


@pytest.fixture(params=CASES)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, TEModelForCausalLM, torch.Tensor, int]:
    """Their model, ours, prompts [2, S], and the length at which the frequencies change."""
    build, length, original = CASES[request.param]
    theirs = build(request.param)
    with warnings.catch_warnings(action="ignore"):
        theirs.save_pretrained(tmp_path / "hf")
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(3))
    return theirs, TEModelForCausalLM.from_pretrained(tmp_path / "hf"), ids, original


@torch.no_grad()
def continued(logits: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The best tokens, each from a forward pass over all before it."""
    for _ in range(NEW):
        ids = torch.cat((ids, logits(ids)[:, -1:].argmax(-1)), dim=1)
    return ids


def fed(model: GPTModel) -> list[int]:
    """Return a list that grows by the number of tokens of each call."""
    calls: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: calls.append(arguments[0].shape[1]))
    return calls


def test_generate(models: Any) -> None:
    theirs, ours, ids, original = models
    expected = continued(lambda x: theirs(x).logits, ids)
    assert torch.equal(expected, continued(lambda x: ours.gpt(x).logits, ids))
    calls, prompt = fed(ours.gpt), ids.shape[1]
    assert torch.equal(generate(ours.gpt, ids, NEW), expected)
    again = [n for n in calls[1:] if n > 1]
    changes = [original + 1] if ours.gpt.config.rope.scaling == "longrope" else range(original + 1, prompt + NEW)
    assert again == list(changes), "all tokens again where the frequencies change, and only there"


def test_generate_with_padding(models: Any) -> None:
    """The longest row decides for all: a short one beside it is rotated as in a forward pass over both."""
    _, ours, ids, _ = models
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def logits(x: torch.Tensor) -> torch.Tensor:
        attention = torch.cat((mask, torch.ones_like(x[:, ids.shape[1] :])), dim=1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        return ours.gpt(x, attention_mask=attention, position_ids=positions).logits

    assert torch.equal(generate(ours.gpt, ids, NEW, attention_mask=mask), continued(logits, ids))


@pytest.mark.sentinels(
    "llama-rope-dynamic-0-{}",
    "phi3-longrope-window-4-{'num_beams': 3}",
    "llama-rope-dynamic-4-{'do_sample': True, 'top_k': 20}",
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}], ids=str)
@pytest.mark.parametrize("pads", [0, 4])
def test_transformers_generate(models: Any, options: dict[str, Any], pads: int) -> None:
    theirs, ours, ids, _ = models
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    results = []
    for model, use_cache in ((theirs, False), (ours, False), (ours, True)):
        torch.manual_seed(5)
        arguments = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options
        results.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **arguments))
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


@torch.no_grad()
def test_a_cache_that_is_continued_otherwise_is_refused(models: Any) -> None:
    _, ours, ids, original = models
    tokens = torch.cat((ids, ids), dim=1)[:, : original + 2]
    expected = ours.gpt(tokens).logits
    cache = KVCache(ours.gpt.config, 2, original + 2)
    ours.gpt(tokens[:, :original], cache=cache)
    with pytest.raises(
        ValueError, match=f"sequences of {original + 2} tokens are rotated otherwise than the {original}"
    ):
        ours.gpt(tokens[:, original:], cache=cache)
    cache.reset()
    assert (ours.gpt(tokens, cache=cache).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
