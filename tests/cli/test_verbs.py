"""The verbs on a real small Llama with a tokenizer: each result is read back by something other than the verb."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models.checkpoints.write.shards import parse_size
from te_models.cli.main import main
from te_models.layers import recipe
from tests.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("shared_tokenizer_process")
TEXT = "def f(x):\n    return x + 1\n" * 20


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random transformers Llama in bfloat16, and a byte-level tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("hf") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer([TEXT]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "model"
    assert main(["import", str(hf), str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def moe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("upcycled") / "moe"
    assert main(["upcycle", str(model), str(out), "--experts", "4", "--topk", "2"]) == 0
    return out


def run_json(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def test_import_then_export_restores_the_folder(
    hf: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(capsys, "export", model, tmp_path / "back")
    before, after = tensors(hf), tensors(tmp_path / "back")
    assert result["plan"]["tensors"] == len(after) and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run_json(capsys, "verify", hf, tmp_path / "back")["equal"] is True


def test_import_converts_dtype_and_layout(moe: Path, tmp_path: Path) -> None:
    assert main(["export", str(moe), str(tmp_path / "hf")]) == 0
    words = ["import", str(tmp_path / "hf"), str(tmp_path / "out"), "--dtype", "float32", "--layout", "per-gemm"]
    assert main(words) == 0
    read = tensors(tmp_path / "out")
    assert {t.dtype for t in read.values()} == {torch.float32}
    expert = read["decoder.layers.1.mlp.experts.linear_fc1.weight3"]
    assert torch.equal(expert, tensors(moe)["decoder.layers.1.mlp.experts.linear_fc1.weight"][3].float())


def test_exported_experts_load_in_transformers(moe: Path, tmp_path: Path) -> None:
    import transformers

    assert main(["export", str(moe), str(tmp_path / "hf"), "--family", "mixtral"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(loaded).__name__ == "MixtralForCausalLM" and loaded.config.num_experts_per_tok == 2


def test_a_quantized_export_says_what_transformers_lacks_to_read_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), str(tmp_path / "fp8"), "--recipe", "current"]) == 0
    assert re.fullmatch(r"in \S+ s wrote .*: 23 tensors, \d+\.\d [KM]iB", capsys.readouterr().out.splitlines()[-1])
    find, notes = importlib.util.find_spec, []
    for hidden in ("accelerate", ""):

        def look(name: str, *rest: Any, hidden: str = hidden) -> Any:
            return None if name == hidden else find(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", look)
        words = ["export", str(tmp_path / "fp8"), str(tmp_path / "hf"), "--format", "fp8-per-tensor", "--force"]
        assert main(words) == 0
        notes.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("note: to read it")])
    needed = "note: to read it, transformers needs the package 'accelerate': pip install 'te_models[quantized]'"
    assert notes == [[needed], []] and main(["export", str(model), str(tmp_path / "plain")]) == 0
    assert "note: to read it" not in capsys.readouterr().out


@pytest.mark.parametrize("quantized", [False, True])
def test_relayout_there_and_back(moe: Path, quantized: bool, tmp_path: Path) -> None:
    source = moe
    if quantized:
        source = tmp_path / "fp8"
        assert main(["quantize", str(moe), str(source), "--recipe", "mxfp8"]) == 0
        assert torch.float8_e4m3fn in {t.dtype for t in tensors(source).values()}
    assert main(["relayout", str(source), str(tmp_path / "there"), "--layout", "per-gemm"]) == 0
    assert main(["relayout", str(tmp_path / "there"), str(tmp_path / "back"), "--layout", "grouped"]) == 0
    before, there, back = tensors(source), tensors(tmp_path / "there"), tensors(tmp_path / "back")
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight" in before.keys() - there.keys()
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight0" in there and before.keys() == back.keys()
    for name, tensor in before.items():
        assert tensor.dtype == back[name].dtype
        assert torch.equal(tensor.view(torch.uint8), back[name].view(torch.uint8)), name


def test_dequantize_writes_the_values(model: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(model), str(tmp_path / "fp8"), "--recipe", "block"]) == 0
    assert main(["dequantize", str(tmp_path / "fp8"), str(tmp_path / "values"), "--dtype", "float32"]) == 0
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    before, after = tensors(model)[name], tensors(tmp_path / "values")[name]
    assert after.dtype == torch.float32
    assert torch.equal(after, recipe("block").weight_quantizer().quantize(before).dequantize(torch.float32))


def test_upcycle_options(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run_json(capsys, "upcycle", model, out, "--experts", 2, "--topk", 1, "--layers", 1, "--noise-std", 0.1, "--seed", 3)
    read = tensors(out)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in read
    one, two = read["decoder.layers.1.mlp.experts.linear_fc1.weight"].float()
    assert 0.05 < (one - two).std() < 0.5


def test_inspect(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "inspect", moe, "--tensors")
    assert result["kind"] == "te_models"
    assert result["parameters"] == sum(t.numel() for t in tensors(moe).values())
    assert set(result["tensors"]) == set(tensors(moe)) and main(["inspect", str(moe), "--tensors"]) == 0
    assert "decoder.layers.1.mlp.router.weight" in capsys.readouterr().out


def test_verify_answers_no_with_1(model: Path, moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "verify", model, moe, code=1)["equal"] is False


def test_dry_run_writes_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["export", model],
        ["relayout", model, "--layout", "per-gemm"],
        ["quantize", model, "--recipe", "block"],
        ["upcycle", model, "--experts", 4, "--topk", 2],
    ):
        result = run_json(capsys, words[0], words[1], tmp_path / "out", *words[2:], "--dry-run")
        assert result["dry_run"] is True and result["plan"]["tensors"] > 0
        assert list(tmp_path.iterdir()) == []
    assert main(["export", str(model), str(tmp_path / "out"), "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("21 tensors, ") and printed[-1].startswith("would write ")
    qkv = "'decoder.layers.1.self_attention.linear_qkv.weight'"
    assert f"  model.layers.1.self_attn.k_proj.weight  BF16 [32, 64]  <-  {qkv}" in printed
    assert list(tmp_path.iterdir()) == []


def test_reshard_splits_and_merges(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "reshard", model, tmp_path / "many", "--max-shard-size", "50kB")
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    result = run_json(capsys, "merge-shards", tmp_path / "many", tmp_path / "one")
    classes = json.loads((tmp_path / "one/conversion.json").read_text())["classes"]
    assert result["plan"]["classes"] == classes and {line["kind"] for line in classes} == {"exact"}
    assert sum(line["count"] for line in classes) == len(tensors(model)) == result["plan"]["tensors"]
    assert main(["reshard", str(model), str(tmp_path / "x"), "--dry-run"]) == 0
    assert "self_attention.linear_qkv.weight: 2 tensors, BF16 -> BF16: exact" in capsys.readouterr().out
    for file in model.iterdir():
        assert (tmp_path / "one" / file.name).read_bytes() == file.read_bytes()
    assert run_json(capsys, "verify", tmp_path / "many", tmp_path / "one")["equal"] is True


def test_sizes_of_shards(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"5GB": 5 * 10**9, "500mb": 5 * 10**8, "2GiB": 2**31, "1.5 kB": 1500, "17B": 17, "1T": 10**12}
    assert {text: parse_size(text) for text in sizes} == sizes
    for wrong in ("", "17", "5PB", "-1", "5i", "0", "1e9", "9" * 400):
        with pytest.raises(SystemExit):
            main(["reshard", str(model), str(tmp_path / "out"), f"--max-shard-size={wrong}"])
        assert "size" in capsys.readouterr().err


def test_recipes_that_a_word_names_are_the_ones_offered(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, hint in (("custom", ""), ("float", ""), ("nvpf4", "; did you mean 'nvfp4'?")):
        with pytest.raises(SystemExit):
            main(["quantize", str(model), str(tmp_path / "out"), "--recipe", name])
        expected = (
            f"te-models: --recipe is {name!r}; allowed: delayed, current, block, mxfp8, nvfp4, int4, int8, mxfp4{hint}"
            "; see: "
        )
        assert capsys.readouterr().err.startswith(expected)


def test_force_replaces_a_model_folder_and_nothing_else(
    hf: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["import", str(hf), str(out)]) == 0
    assert main(["upcycle", str(model), str(out), "--experts", "4", "--topk", "2"]) == 2
    assert "--force" in capsys.readouterr().err and "decoder.layers.0.mlp.router.weight" not in tensors(out)
    assert main(["upcycle", str(model), str(out), "--experts", "4", "--topk", "2", "--force"]) == 0
    assert "decoder.layers.0.mlp.router.weight" in tensors(out)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("42")
    assert main(["import", str(hf), str(other), "--force"]) == 2
    assert "not a model folder" in capsys.readouterr().err
    assert [file.name for file in other.iterdir()] == ["thesis.tex"]
    for config in ('{"name": "my-app"}', "[]", "{", '{"model_type": 3}'):  # of another program
        (other / "config.json").write_text(config)
        assert main(["import", str(hf), str(other), "--force"]) == 2
        assert "not a model folder" in capsys.readouterr().err and (other / "thesis.tex").exists()
    (out / "config.json").write_text("{")
    assert main(["import", str(hf), str(out), "--force"]) == 0  # damaged, with weights


@pytest.mark.parametrize("out", [".", "model/..", "link"])
def test_what_contains_the_folder_that_is_read_is_not_replaced(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    shutil.copytree(hf, tmp_path / "model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # --force takes it for a model folder
    (tmp_path / "link").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    for verb in ("import", "reshard", "toy"):
        assert main([verb, "model", out, "--force"]) == 2
        error = capsys.readouterr().err
        assert ("is the current directory, or contains it" in error) or (out == "link" and "is not a folder" in error)
    assert {path: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_generate_is_transformers_greedy_text(hf: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    words = ["--prompt", "def f(x):", "--max-new-tokens", 20, "--dtype", "float32"]
    ours = run_json(capsys, "generate", model, *words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    prompt = tokenizer("def f(x):", return_tensors="pt", add_special_tokens=False)
    ids = theirs.generate(
        **prompt, max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    assert ours["tokens"] == ids[0, prompt.input_ids.shape[1] :].tolist()
    assert main(["generate", str(model), *map(str, words)]) == 0
    assert capsys.readouterr().out == "def f(x):" + ours["text"] + "\n"


def test_generate_samples_reproducibly(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(seed: int) -> list[int]:
        words = ["--prompt", "x", "--temperature", 1.0, "--top-p", 0.9, "--max-new-tokens", 16, "--seed", seed]
        return run_json(capsys, "generate", model, *words)["tokens"]

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.slow
def test_generate_reads_standard_input(model: Path) -> None:
    command = [sys.executable, "-m", "te_models", "generate", str(model), "--prompt", "-", "--max-new-tokens", "3"]
    run = subprocess.run(command, input="return é", capture_output=True, text=True, check=True)
    assert run.stdout.startswith("return é")


def test_generate_refuses_more_than_the_positions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model), "--prompt", "x", "--max-new-tokens", "128"]) == 2
    assert "allowed: 1..127" in capsys.readouterr().err
    assert main(["generate", str(model), "--prompt", "\x01" * 129, "--max-new-tokens", "1"]) == 2
    assert "the prompt has 129 tokens; allowed: fewer than the model's 128 positions" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--top-k", "--top-p"])
def test_generate_refuses_options_of_sampling_that_nothing_would_read(
    model: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), "--prompt", "x", option, "1"]) == 2
    assert f"{option} needs --temperature above 0" in capsys.readouterr().err


def test_generate_reads_the_whole_prompt(hf: Path, model: Path, tmp_path: Path, capsys) -> None:
    """Also where tokenizer.json says to cut texts and to fill them up."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=30, pad_id=0)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["generate", model, "--prompt", "def f(x):", "--max-new-tokens", 8]
    expected = run_json(capsys, *words)["tokens"]
    shutil.copy(hf / "tokenizer_config.json", tmp_path)
    assert run_json(capsys, *words, "--tokenizer", tmp_path)["tokens"] == expected


def test_generate_begins_and_ends_a_text_as_transformers_does(hf: Path, tmp_path: Path, capsys) -> None:
    """With the token that the tokenizer puts before every text, up to any token at which the model says it ends."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end>"])
    first = tokenizer.token_to_id("x")
    tokenizer.post_processor = TemplateProcessing(single="x $A <end>", special_tokens=[("x", first), ("<end>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    ids = torch.tensor([[first, *tokenizer.encode("def f(", add_special_tokens=False).ids]])
    expected = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    words = ["generate", folder, "--max-new-tokens", 20, "--dtype", "float32", "--prompt"]
    new = expected[0, ids.shape[1] :].tolist()
    assert run_json(capsys, *words, "def f(")["tokens"] == run_json(capsys, *words, "xdef f(")["tokens"] == new
    values = {"eos_token_id": [299, new[5]]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert run_json(capsys, *words, "def f(")["tokens"] == new[: new.index(new[5]) + 1]
    (folder / "generation_config.json").write_text("{")
    assert main([*map(str, words), "def f("]) == 2
    assert "generation_config.json is not valid JSON" in capsys.readouterr().err


def test_what_generate_cannot_use_is_bad_input(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    for words, says in (
        (["--prompt", "x", "--device", "no-such"], "--device is 'no-such'; allowed here: cpu"),
        (["--prompt", "x", "--device", "cuda:99"], "--device is 'cuda:99'; allowed here: cpu"),
        (["--prompt", "a\udcff"], "the prompt is not UTF-8 text"),
        (
            ["--prompt", "x", "--temperature", "1", "--seed", str(2**64)],
            f"seed is {2**64}; allowed: -2**63 to 2**64 - 1",
        ),
        (["--prompt-file", str(tmp_path)], f"{tmp_path}: Is a directory"),
        (
            ["--prompt-file", str(tmp_path / "bytes")],
            f"{tmp_path}/bytes is not UTF-8 text: invalid start byte at byte 2",
        ),
    ):
        assert main(["generate", str(model), *words]) == 2
        assert capsys.readouterr().err.startswith(f"te-models: {says}")


def test_train_then_generate(model: Path, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.py").write_text(TEXT * 20)
    config = tmp_path / "train.toml"
    config.write_text(f"""
output_dir = "{tmp_path}/run"
steps = 3
device = "cpu"
compile = false
[model]
path = "{model}"
[data]
path = "{tmp_path}/tokens"
text = ["{tmp_path}/text.py"]
tokenizer = "{hf}"
sequence_length = 32
[log]
progress = false
""")
    assert main(["train", str(config), "--dry-run", "--optimizer.lr", "0.01"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"]["lr"] == 0.01
    assert not (tmp_path / "run").exists()
    result = run_json(capsys, "train", config, "--steps", 4, "--data.micro-batch-size", 2)
    assert result["step"] == 4 and result["loss"] < 7
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert main(["generate", result["model_dir"], "--prompt", "def", "--max-new-tokens", "4"]) == 0


def test_train_names_a_wrong_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.toml").write_text('output_dir = "x"\nstepz = 3\n')
    assert main(["train", str(tmp_path / "train.toml")]) == 2
    error = capsys.readouterr().err
    assert f"te-models: {tmp_path}/train.toml has no key 'stepz'; allowed: output_dir, steps, " in error
    assert error.endswith("; did you mean 'steps'?\n")
    (tmp_path / "train.toml").write_text('output_dir = "x"\nmodel.path = "m"\ndata.path = "d"\n')
    assert main(["train", "--steps", "3", str(tmp_path / "train.toml"), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_converters_say_what_they_keep_and_leave_out(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "hf"
    shutil.copytree(hf, source)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {**load_file(source / "model.safetensors"), name: torch.ones(8)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert "kept 1 tensor that the model does not use" in capsys.readouterr().out
    assert main(["upcycle", str(tmp_path / "ours"), str(tmp_path / "moe"), "--experts", "2", "--topk", "1"]) == 0
    assert f"left out carried.{name}" in capsys.readouterr().out


def test_toy_keeps_the_first_layers(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", str(hf), str(tmp_path / "toy"), "--layers", "1"]) == 0
    assert "tensors" in capsys.readouterr().out
    part, whole = load_file(tmp_path / "toy/model.safetensors"), load_file(hf / "model.safetensors")
    assert part.keys() == {name for name in whole if ".layers.1." not in name}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    assert main(["toy", str(hf), str(tmp_path / "x"), "--experts", "2"]) == 2
    assert "experts is 2; allowed: None, because the model has no experts" in capsys.readouterr().err
