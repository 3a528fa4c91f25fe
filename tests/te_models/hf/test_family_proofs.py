"""Every family: greedy text as transformers', a compiled training step under a recipe, and a quantized folder."""

import warnings
from pathlib import Path

import pytest
import torch

from te_models import GPTModel, generate
from te_models.checkpoints import export_hf, import_hf, quantize
from te_models.layers import MXFP8BlockScaling, autocast
from tests.build import one_layer
from tests.checkpoints.families.test_families import tokens
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.mixer_cases import MIXERS

FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}
FORMS = {"dbrx": "per-expert"}
"""Family -> the form that quantized files have, where it is not the published one: there, down projections of experts
are stored [in, out], one below the other, which cuts blocks of scales."""
PROMPT = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.sentinels(
    *("cohere", "exaone4", "mellum", "axk1", "hunyuan_v1_dense", "laguna-channels", "mimo_v2_flash", "afmoe")
)
@pytest.mark.parametrize("case", dict.fromkeys([*FIRST_CASES.values(), *MIXERS]))
@torch.no_grad()
def test_greedy_text(case: str) -> None:
    """The first case of each family, and each kind of mixers. transformers' decoding does not bound the steps of
    Mamba-2, its forward pass does: where a case has such a bound, the peer decodes without a cache."""
    cached = "time_step_min" not in CASES[case][1]
    theirs, prompt = make(case), PROMPT if case in FIRST_CASES.values() or not cached else tokens(7)
    ours = GPTModel.from_hf(theirs).eval()
    length = prompt.shape[1] + 12
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(prompt, max_length=length, use_cache=cached, **settings)
    assert torch.equal(generate(ours, prompt, max_new_tokens=12)[:, :length], expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST_CASES)
def test_compiled_step_under_a_recipe(family: str) -> None:
    """The same loss and gradients as without the compiler, in one graph. Of layers that are alike, one is compiled;
    without dropout, of which a graph draws other masks."""
    config = GPTModel.from_hf(make(FIRST_CASES[family])).config
    config = config.replace(
        hidden_dropout=0.0,
        embedding=config.embedding.replace(embedding_dropout=0.0),
        attention=config.attention.replace(attention_dropout=0.0),
    )
    alike = len(set(config.layer_types)) == 1 and (config.moe is None or config.moe.layers is None)
    ours = GPTModel(one_layer(config) if alike and config.layer_mixers is None else config)
    losses, gradients = [], []
    for model in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        ours.zero_grad()
        with autocast(recipe=MXFP8BlockScaling()):
            loss = model(PROMPT, labels=PROMPT).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.sentinels("cohere", "axk1")
@pytest.mark.parametrize("family", FIRST_CASES)
def test_a_quantized_folder_there_and_back(tmp_path: Path, family: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        make(FIRST_CASES[family]).save_pretrained(tmp_path / "hf")
        import_hf(tmp_path / "hf", tmp_path / "ours")
        quantize(tmp_path / "ours", tmp_path / "quantized", "mxfp8")
        export_hf(tmp_path / "quantized", tmp_path / "hf8", format="mxfp8", form=FORMS.get(family))
        import_hf(tmp_path / "hf8", tmp_path / "again")
    before, again = stored(tmp_path / "quantized"), stored(tmp_path / "again")  # files hold no columnwise copies
    assert any(t.dtype == torch.float8_e4m3fn for t in again.values())
    assert_same_bits({name: before[name] for name in again}, again)
