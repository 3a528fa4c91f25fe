"""Every family in bfloat16 against transformers: norms bit for bit, and logits as near to the exact ones as theirs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models import GPTModel
from tests.checkpoints.family_cases import CASES, make

FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}
"""Family -> its first case."""


def final_norm(model: Any) -> torch.nn.Module:
    base = model.model if hasattr(model, "model") else model.base_model
    base = getattr(base, "decoder", base)
    names = ("norm", "norm_f", "ln_f", "final_layer_norm", "final_layernorm", "embedding_norm", "layer_norm")
    return next(getattr(base, name) for name in names if hasattr(base, name))


@pytest.mark.sentinels("mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "gemma2", "gpt2")
@pytest.mark.parametrize("family", FIRST_CASES)
@torch.no_grad()
def test_norms_are_those_of_transformers(family: str) -> None:
    """The order of casts of each family: before the weight, behind it, and with 1 added to it or not."""
    theirs = make(FIRST_CASES[family], dtype=torch.bfloat16)
    ours = GPTModel.from_hf(theirs, dtype=torch.bfloat16).eval()
    x = 3 * torch.randn(512, ours.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, expected = ours.decoder.final_layernorm(x), final_norm(theirs)(x)
    if family == "nemotron":  # transformers rounds weight + 1 to bfloat16, which we do not
        exact = final_norm(make(FIRST_CASES[family]))
        exact.load_state_dict({n: t.float() for n, t in final_norm(theirs).state_dict().items()})
        assert distance(got, exact(x.float())) < distance(expected, exact(x.float()))
    elif family in ("cohere", "gpt_neo"):  # transformers sums in another order, which one number in 16384 notices
        assert (got != expected).float().mean() < 1e-3
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(got, expected)


def distance(a: Tensor, b: Tensor) -> float:
    """Root mean square of the differences."""
    return (a.float() - b.float()).pow(2).mean().sqrt().item()


@pytest.mark.sentinels("mixtral", "gpt_oss", "deepseek_v3", "llama4", "gemma2", "gpt2")
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_as_near_to_the_exact_ones(case: str) -> None:
    """Both compute with the same number of roundings, so neither is much farther from float32 with the same weights.

    Compared by the token in the middle: one that two roundings send to different experts is twenty times as far, and
    that happens to either side, by chance."""
    theirs, exact = make(case, dtype=torch.bfloat16), make(case)
    theirs.set_experts_implementation("eager")  # torch's grouped product wants rows of whole 16 bytes
    exact.load_state_dict({name: tensor.float() for name, tensor in theirs.state_dict().items()})
    ours = GPTModel.from_hf(theirs, dtype=torch.bfloat16).eval()
    ids = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    reference, got = exact(ids).logits, ours(ids).logits
    assert got.dtype == torch.bfloat16
    ours_off, theirs_off = (
        (logits.float() - reference).pow(2).mean(-1).sqrt().median().item() for logits in (got, theirs(ids).logits)
    )
    assert ours_off <= 1.5 * theirs_off < 0.3 * reference.std().item()
