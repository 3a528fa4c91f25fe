"""compare_logits: agreement of the same weights, and a changed layer found."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import compare_logits as agreement
from te_models.checkpoints import import_hf, quantize
from te_models.cli.main import main
from te_models.compare_logits import compare_logits, kl_divergence, load_theirs
from tests.checkpoints import quantized_cases
from tests.checkpoints.families.test_text_part import make as make_with_images
from tests.checkpoints.families.test_text_part import save as save_with_images
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import transformers
from tests.te_models.hf_models import CASES as FIRST
from tests.te_models.hf_models import hf_model


def save(case: str, folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        model = make(case) if case in CASES else hf_model(case)
        if "youtu" in case:  # whose padding row transformers makes zero as it loads
            model.get_input_embeddings().weight.data[0] = 0
        model.save_pretrained(folder)
    return folder


def test_kl_divergence_is_that_of_torch() -> None:
    p, q = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    p_distribution, q_distribution = (
        torch.distributions.Categorical(logits=p),
        torch.distributions.Categorical(logits=q),
    )
    expected = torch.distributions.kl_divergence(p_distribution, q_distribution)
    torch.testing.assert_close(kl_divergence(p, q).float(), expected)
    assert torch.equal(kl_divergence(p, p), torch.zeros(5, dtype=torch.float64))


@pytest.mark.sentinels("mixtral0", "gpt_oss", "deepseek_v3", "llama4", "gemma2", "gpt2", "gemma3n", "deepseek_v4")
@pytest.mark.parametrize("case", [*FIRST, *CASES])
def test_the_same_model_agrees_in_every_layer(tmp_path: Path, case: str) -> None:
    source = save(case, tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    report = compare_logits(source, tmp_path / "ours", tokens=50)
    assert report.agree and report.first_divergence is None and report.argmax_agreement == 1.0
    assert 0 <= report.kl_mean <= report.kl_max < 1e-6
    # of gemma3n, transformers returns the lanes of the last layer instead
    last = f"layer {CASES[case][1].get('num_hidden_layers', 2) - 2}" if "gemma3n" in case else "final norm"
    assert next(iter(report.stages)) == "embedding" and list(report.stages)[-1] == last
    assert max(report.stages.values()) < 1e-4


def test_the_first_layer_that_differs_is_named(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "hf")  # three layers
    file, name = tmp_path / "hf/model.safetensors", "model.layers.1.mlp.down_proj.weight"
    import_hf(source, tmp_path / "ours")
    tensors = load_file(file)
    tensors[name][0] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    report = compare_logits(source, tmp_path / "ours", tokens=70)
    assert report.first_divergence == "layer 1" and not report.agree
    assert report.tokens == 70 and report.kl_max >= report.kl_mean > 1e-4
    assert report.stages["layer 0"] < 1e-5 < report.stages["layer 1"]
    assert compare_logits(source, tmp_path / "ours", tolerance=10.0).agree


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


CODE = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}


def test_folders_that_transformers_does_not_open_by_itself_agree(tmp_path: Path) -> None:
    """A model that sees images and has no class for text alone, a kind that only has code of its own, which is not run,
    and fields of published files that transformers ignores, takes for another value, or cannot run with."""
    images = save_with_images(make_with_images("mistral3-of-ministral3"), tmp_path / "mistral3")
    kimi = save("deepseek_v3", tmp_path / "kimi")
    edit_config(kimi, model_type="kimi_k2", auto_map=CODE)
    minimax = save("minimax_m2", tmp_path / "minimax")
    edit_config(minimax, rotary_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    gemma = save("gemma", tmp_path / "gemma")
    edit_config(gemma, hidden_act="gelu", hidden_activation=None)
    guard = save("llama4-dense", tmp_path / "guard")
    edit_config(guard, attention_chunk_size=None)
    for folder in (images, kimi, minimax, gemma, guard):
        report = compare_logits(folder, folder, tokens=20)
        assert report.agree and report.argmax_agreement == 1.0, folder
        assert next(iter(report.stages)) == "embedding"


def test_weights_that_transformers_dequantizes_are_compared_in_the_dtype(tmp_path: Path) -> None:
    folder, _ = quantized_cases.make(quantized_cases.CASES["mxfp4-gpt-oss"], tmp_path, torch.float32)
    report = compare_logits(folder, folder, tokens=20)
    assert report.agree and report.relative_error < 1e-5


def test_what_transformers_cannot_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save("llama", tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    edit_config(source, model_type="something", auto_map=CODE)
    capsys.readouterr()
    assert main(["verify", "--logits", str(source), str(tmp_path / "ours")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"te-models: transformers cannot read {source}: ValueError: ") and "code" in line


def test_pickled_weights_are_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers would open them, and find the same model."""
    source = save("llama", tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["verify", "--logits", str(source), str(tmp_path / "ours")]) == 2
    assert "only pickled weights ('pytorch_model.bin'), which can run code" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"transformers cannot read .* model\.safetensors"):
        load_theirs(source, torch.float32)


def test_folders_that_are_not_there_are_named_before_any_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("llama", tmp_path / "hf")
    monkeypatch.setattr(agreement, "load_theirs", lambda *_: pytest.fail("was loaded"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for pair, missing in ((["gone", str(source)], "gone"), ([str(source), "away"], "away")):
        assert main(["verify", "--logits", *pair]) == 2
        assert capsys.readouterr().err == f"te-models: {missing} is not a folder\n"
    (source / "config.json").rename(tmp_path / "config.json")
    assert main(["verify", "--logits", str(source), str(source)]) == 2
    assert "it has no config.json" in capsys.readouterr().err


def test_windows_are_no_longer_than_the_positions(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=24)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    report = compare_logits(tmp_path / "hf", tmp_path / "hf", tokens=50)
    assert report.agree and report.tokens == 50


def test_models_of_other_sizes_are_refused(tmp_path: Path) -> None:
    for width in (32, 48):
        config = transformers.GPT2Config(vocab_size=97, n_embd=width, n_layer=2, n_head=2, n_positions=24)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / str(width))
    with pytest.raises(ValueError, match=r"32 has the hidden size 32 and .*48 48"):
        compare_logits(tmp_path / "32", tmp_path / "48", tokens=20)


def test_quantized_weights_are_close_and_not_equal(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "hf")
    quantize(source, tmp_path / "fp8", "block")
    report = compare_logits(source, tmp_path / "fp8")
    assert not report.agree and report.relative_error < 0.3 and report.argmax_agreement > 0.5


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save("llama", tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    pair = [str(source), str(tmp_path / "ours")]
    capsys.readouterr()
    assert main(["verify", "--logits", *pair, "--tokens", "20", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # no bars of transformers, where nobody is watching
    result = json.loads(printed.out)
    assert result["agree"] is True and result["tokens"] == 20 and result["dtype"] == "float32"
    assert main(["verify", "--logits", *pair, "--dtype", "bfloat16", "--tolerance", "1e-9"]) == 1
    assert capsys.readouterr().out.startswith("differ: 256 tokens in bfloat16\n")
    assert main(["verify", *pair, "--tokens", "5"]) == 2
    assert "--tokens needs --logits" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", *pair, "--logits", "--tokens", "0"])
    assert "--tokens is 0; allowed: 1 or more" in capsys.readouterr().err
    assert main(["verify", "--logits", *pair[::-1]]) == 2
    assert f"{pair[1]} is a te_models folder; allowed: a Hugging Face folder" in capsys.readouterr().err
    other = save("qwen2", tmp_path / "qwen2")
    assert main(["verify", "--logits", str(other), str(tmp_path / "ours")]) == 1


def test_results_that_are_no_numbers_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save("llama", tmp_path / "hf")
    folders = [str(source), str(source)]
    assert main(["verify", "--logits", *folders, "--tolerance", "inf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tolerance"] is None
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", "--logits", *folders, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["agree"] is False and result["relative_error"] is result["stages"]["layer 1"] is None
    assert result["first_divergence"] == "layer 1" and result["stages"]["layer 0"] < 1e-4


@pytest.mark.usefixtures("shared_tokenizer_process")
def test_a_text_is_read_with_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tokenizers

    source = save("llama", tmp_path / "hf")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    (tmp_path / "text").write_text("a b b a")
    (tmp_path / "empty").write_text("")
    folders = [str(source), str(source)]
    assert main(["verify", "--logits", *folders, "--text", str(tmp_path / "text"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4
    assert main(["verify", "--logits", *folders, "--text", str(tmp_path / "empty")]) == 2
    assert "the text has no tokens" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["gemma2", "qwen2", "llama"])
def test_a_text_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """transformers makes one up for some families, without words: a model of one token would agree with any."""
    source = str(save(case, tmp_path / "hf"))
    (tmp_path / "text").write_text("a b b a")
    capsys.readouterr()
    assert main(["verify", "--logits", source, source, "--text", str(tmp_path / "text")]) == 2
    assert "hf has no tokenizer to read the text with" in capsys.readouterr().err
