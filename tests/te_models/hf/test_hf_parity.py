"""GPTModel against transformers, through real files: logits, loss, gradients, padding, and the way back.

Bounds. float32: 1e-5 of the largest logit. bfloat16, against the float32 result of the same (bfloat16) weights: a
forward of 3 layers rounds each value on its way to the logits about n = 3 * 12 + 2 times with unit roundoff u = 2^-8;
roundings are independent, so logits are within u sqrt(n) = 2.4 % of the largest one. The sharper test is that our error
is no larger than transformers'."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from te_models import GPTModel
from tests.te_models.hf_models import CASES, hf_model, token_ids

FLOAT32_BOUND = 1e-5
BFLOAT16_BOUND = 2.0**-8 * math.sqrt(3 * 12 + 2)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over largest magnitude."""
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def both(folder: Path, name: str, dtype: torch.dtype = torch.float32):
    """The case's transformers model, and ours loaded from the files it writes."""
    theirs = hf_model(name, dtype=dtype)
    theirs.save_pretrained(folder)
    return theirs, GPTModel.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.sentinels(
    "llama-rope-yarn", "qwen3_moe-mixed", "mistral-window", "llama-tied-head_dim", "mixtral", "qwen2", "qwen3"
)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_float32_logits_and_loss(tmp_path: Path, name: str) -> None:
    theirs, ours = both(tmp_path, name)
    # One token, an odd length, and for the extension that depends on it a length beyond the trained one.
    for length in (1, 13, 100 if "dynamic" in name else 40):
        ids = token_ids(2, length, seed=length)
        expected = theirs(ids, labels=ids) if length > 1 else theirs(ids)
        got = ours(ids, labels=ids)
        assert relative_error(got.logits, expected.logits) <= FLOAT32_BOUND
        if length > 1:
            assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
            loss_only = ours(ids, labels=ids, return_logits=False)
            assert loss_only.logits is None
            assert loss_only.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3_moe"])
@torch.no_grad()
def test_padding(tmp_path: Path, name: str) -> None:
    """Left and right padding, with positions as transformers sees them and with positions that start at the prompt."""
    theirs, ours = both(tmp_path, name)
    ids = token_ids(3, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[1, 15:] = 0
    shifted = (mask.cumsum(-1) - 1).clamp(min=0)
    for positions in (None, shifted):
        expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
        for form in (mask, mask.bool()):
            got = ours(ids, attention_mask=form, position_ids=positions).logits
            assert got.isfinite().all()
            kept = mask.bool()
            assert relative_error(got[kept], expected[kept]) <= FLOAT32_BOUND


def routed(model: torch.nn.Module, gate: str, k: int) -> list[Tensor]:
    """Collect, at each call, the set of experts each token chooses, [T, E] bool per MoE layer; none where two tie."""
    choices: list[Tensor] = []

    def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        values, indices = logits.topk(k + 1, dim=-1)
        tie = values[:, k - 1 : k] == values[:, k:]  # bfloat16 has equal logits, between which any may be chosen
        choices.append(chosen.scatter_(1, indices[:, :k], True) & ~tie)

    for name, module in model.named_modules():
        if name.endswith(gate):
            module.register_forward_hook(hook)
    return choices


@pytest.mark.sentinels("llama-rope-yarn", "qwen3_moe-mixed", "mistral-window", "llama-tied-head_dim", "mixtral")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_bfloat16_logits(tmp_path: Path, name: str) -> None:
    """In an MoE a rounding error can change which experts a token uses; compared are the tokens before that happens."""
    theirs, ours = both(tmp_path, name, torch.bfloat16)
    exact = hf_model(name, dtype=torch.bfloat16).float()
    k = 0 if ours.config.moe is None else ours.config.moe.moe_router_topk
    models = {exact: ".mlp.gate", theirs: ".mlp.gate", ours: ".mlp.router"}
    choices = [routed(model, gate, k) for model, gate in models.items()]
    batch, length = 8, 13
    ids = token_ids(batch, length)
    logits = [model(ids).logits for model in models]
    assert logits[2].dtype == torch.bfloat16
    agree = torch.ones(batch, length, dtype=torch.bool)
    for layer in zip(*choices, strict=True):
        agree &= ((layer[0] == layer[1]) & (layer[0] == layer[2])).all(dim=-1).view(batch, length)
    compared = agree.long().cumprod(dim=-1).bool()
    assert compared.float().mean() >= (1.0 if k == 0 else 0.5)
    expected, their_logits, our_logits = (t[compared] for t in logits)
    assert relative_error(our_logits, expected) <= BFLOAT16_BOUND
    ours_squared, theirs_squared = ((t - expected).square().mean() for t in (our_logits, their_logits))
    assert ours_squared.sqrt() <= 1.1 * theirs_squared.sqrt()


@pytest.mark.parametrize("name", ["qwen3-biases-window", "qwen3_moe-mixed"])
def test_gradients(tmp_path: Path, name: str) -> None:
    """Their gradients become the weights of a model in files, which ours loads: every gradient in our names."""
    theirs, ours = both(tmp_path / "model", name)
    ids = token_ids(2, 19)
    theirs(ids, labels=ids).loss.backward()
    ours(ids, labels=ids, return_logits=False).loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    expected = dict(GPTModel.from_pretrained(tmp_path / "gradients").named_parameters())
    assert len(expected) > 20
    for key, parameter in ours.named_parameters():
        assert expected[key].abs().max() > 0, key
        assert relative_error(parameter.grad, expected[key]) <= FLOAT32_BOUND, key


@pytest.mark.parametrize("name", ["llama-tied-head_dim", "qwen3_moe"])
def test_own_files_restore_the_model_in_either_layout(tmp_path: Path, name: str) -> None:
    _, ours = both(tmp_path / "hf", name)
    ours.save_pretrained(tmp_path / "ours")
    ids = token_ids(2, 9)
    with torch.no_grad():
        expected = ours(ids).logits
        for layout in ("grouped", "per-gemm"):
            again = GPTModel.from_pretrained(tmp_path / "ours", expert_layout=layout).eval()
            assert again.config == ours.config and torch.equal(again(ids).logits, expected)
