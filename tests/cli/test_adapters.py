"""`merge`, and `--adapter` of the verbs that run models, on a model with an adapter of known effect."""

import json
from pathlib import Path

import pytest
import torch

from te_models import GPTModel, ModelConfig
from te_models.cli.main import main
from te_models.lora import add_lora, merge_lora, save_adapter
from te_models.lora.rounding import round_stochastically
from tests.build import tiny

TOKENS = torch.arange(1, 40)[None] % 32


Folders = tuple[Path, Path, GPTModel]
"""The model, the adapter, and the model with the adapter."""


def logits(model: GPTModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().float()(TOKENS).logits


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """A folder in bfloat16, one of a small adapter for it, and the model with it, unmerged in float32."""
    torch.manual_seed(0)
    model = GPTModel(tiny(vocab_size=300), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    model = GPTModel.from_pretrained(tmp_path / "base", dtype="float32")
    add_lora(model, rank=2, alpha=2.0, targets=["q_proj", "down_proj"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-4)
    save_adapter(model, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    return tmp_path / "base", tmp_path / "adapter", model


def test_names_of_transformers_are_targets(folders: Folders) -> None:
    targets = json.loads((folders[1] / "adapter_config.json").read_text())["target_modules"]
    assert {name.rpartition(".")[2] for name in targets} == {"linear_qkv", "linear_fc2"}


def merged(folders: Folders, capsys: pytest.CaptureFixture, *options: str) -> tuple[float, GPTModel]:
    base, adapter, _ = folders
    out = base.parent / f"merged{len(list(base.parent.iterdir()))}"
    assert main(["merge", str(base), str(adapter), str(out), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["lost"], GPTModel.from_pretrained(out, dtype="float32")


def test_rounding_to_16_bits_loses_a_small_adapter_and_says_so(folders: Folders, capsys: pytest.CaptureFixture) -> None:
    want = logits(folders[2])
    effect = (want - logits(GPTModel.from_pretrained(folders[0], dtype="float32"))).norm()
    lost, model = merged(folders, capsys)
    assert lost > 0.5 and (logits(model) - want).norm() > 0.5 * effect
    lost, model = merged(folders, capsys, "--dtype", "float32")
    assert lost < 1e-3 and (logits(model) - want).norm() < 1e-2 * effect
    assert next(model.parameters()).dtype == torch.float32


def test_stochastic_rounding_keeps_the_changes_on_average(folders: Folders) -> None:
    values = torch.full((100_000,), 1.0 + 2.0**-10)  # an eighth of the way to the next number
    found = round_stochastically(values, torch.bfloat16, torch.Generator().manual_seed(0)).float()
    assert set(found.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(found.mean().item() - values[0].item()) < 5 * 2.0**-7 * (0.125 * 0.875 / len(values)) ** 0.5
    kept = torch.tensor([1.5, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(torch.bfloat16).max, 3.4e38])
    same = round_stochastically(kept, torch.bfloat16, torch.Generator().manual_seed(0))
    assert torch.equal(same.view(torch.int16), kept.to(torch.bfloat16).view(torch.int16))


def test_merging_says_what_it_lost(folders: Folders) -> None:
    assert merge_lora(folders[2]) < 1e-3


def test_an_adapter_alone_is_no_model(folders: Folders, capsys: pytest.CaptureFixture) -> None:
    base, adapter, _ = folders
    for verb in (["generate", str(adapter), "--prompt", "a"], ["eval", str(adapter), "--text", "x"]):
        assert main([*verb, "--tokenizer", "bytes"]) == 2
        assert f"is an adapter, and has no model; name its model, too: {base} --adapter {adapter}" in (
            capsys.readouterr().err
        )
    assert main(["generate", str(base), "--adapter", str(base), "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert (
        "has no adapter_config.json; allowed: a folder that training wrote as adapter/, or peft"
        in capsys.readouterr().err
    )


def test_generate_and_eval_with_an_adapter(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A large adapter changes what both say, as the merged model says it."""
    base, adapter, model = folders
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    save_adapter(model, adapter)
    (tmp_path / "text.txt").write_text("some text to predict " * 20)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "sum"), "--dtype", "float32"]) == 0
    options = ["--dtype", "float32", "--tokenizer", "bytes", "--json"]

    def said(*verb: str) -> object:
        capsys.readouterr()
        assert main([*verb, *options]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["tokens"] if "tokens" in found else round(found["text"]["all"]["nats_per_token"], 4)

    for verb, rest in (
        ("generate", ("--prompt", "some", "--max-new-tokens", "5")),
        ("eval", ("--text", str(tmp_path / "text.txt"))),
    ):
        with_adapter = said(verb, str(base), "--adapter", str(adapter), *rest)
        assert with_adapter == said(verb, str(tmp_path / "sum"), *rest) != said(verb, str(base), *rest)


def test_the_configuration_is_unchanged(folders: Folders, capsys: pytest.CaptureFixture) -> None:
    config: ModelConfig = merged(folders, capsys)[1].config
    assert config == folders[2].config


def test_what_is_no_model_is_refused_by_its_kind(folders: Folders, capsys: pytest.CaptureFixture) -> None:
    """Before a tokenizer is looked for: a folder without config.json, a file, and an adapter."""
    empty, file = folders[0].parent / "empty", folders[0].parent / "a.txt"
    empty.mkdir()
    file.write_text("text")
    for verb, *words in (("generate", "--prompt", "a"), ("eval", "--text", str(file))):
        for named, sentence in (
            (empty, "is no model folder: it has no config.json"),
            (file, "is not a folder; allowed"),
        ):
            assert main([verb, str(named), *words]) == 2 and sentence in capsys.readouterr().err
    adapter, out = str(folders[1]), str(folders[0].parent / "out")
    init = ["init", "--task", "lora", "--output", out, "--model", adapter]
    for words in (["inspect", adapter], ["export", adapter, out], ["reshard", adapter, out], init):
        assert main(words) == 2
        assert (
            f"adapter is an adapter, and has no model; te-models merge {folders[0]} {adapter} OUT"
            in capsys.readouterr().err
        )
