"""Models of transformers trained under a recipe by `replace_linears`: saved as before, and loaded by transformers."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="its models are what is changed")

from te_models import GPTModel  # noqa: E402
from te_models.layers import autocast, recipe, replace_linears  # noqa: E402
from te_models.quickstart.smollm import smollm_folder  # noqa: E402
from tests.te_models.hf_models import SIZES  # noqa: E402


def losses(model: torch.nn.Module, ids: torch.Tensor, name: str, steps: int, lr: float) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=lr), []
    for _ in range(steps):
        with autocast(recipe=recipe(name)):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.sentinels("False-mxfp8", "True-delayed")
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_trains_and_is_saved_as_before(tied: bool, name: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(1, 97, (2, 16))
    before, names = model(ids).logits, list(model.state_dict())
    report = replace_linears(model)
    assert len(report.replaced) == 7 * 3 and report.left == {"lm_head": "it is the output layer"}
    assert torch.equal(model(ids).logits, before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    found = losses(model, ids, name, 6, 1e-2)
    assert found[-1] < found[0] - 0.5 and list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        ours = GPTModel.from_pretrained(tmp_path)
        torch.testing.assert_close(ours.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_learns_a_text_under_mxfp8(tmp_path: Path) -> None:
    folder = smollm_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    text = (
        "The first thing that the compiler does with a function is to read it, line by line, and to note what it calls."
    )
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])
    report = replace_linears(model, recipe("mxfp8"))
    assert len(report.replaced) == 7 * 30 and list(report.left) == ["lm_head"]
    found = losses(model, ids, "mxfp8", 3, 1e-4)
    assert found[-1] < found[0] - 0.5
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
