"""Import and export of all families: bits and configuration come back, and transformers loads the result."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import te_models.checkpoints as checkpoints
from tests.checkpoints.hf_cases import CASES, HFFolder, assert_same_bits, stored, transformers


@pytest.mark.sentinels(
    "llama-tied-biases-llama3-grouped",
    "mixtral-per-gemm",
    "qwen3_moe-grouped",
    "qwen2-windows-yarn-per-gemm",
    "mixtral-tied-window-grouped",
    "qwen3_moe-mixed-layers-per-gemm",
)
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("case", CASES)
def test_import_then_export_restores_everything(hf_folder: HFFolder, tmp_path: Path, case: str, layout: str) -> None:
    source = hf_folder(case)
    checkpoints.import_hf(source, tmp_path / "ours", layout=layout)
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    for folder in ("ours", "back"):
        checkpoints.check_manifest(tmp_path / folder)
        report = checkpoints.verify(source, tmp_path / folder)
        assert report.equal and report.tensors > 10, str(report)


@pytest.mark.parametrize("case", CASES)
def test_import_has_the_model_s_names_shapes_and_values(hf_folder: HFFolder, tmp_path: Path, case: str) -> None:
    source = hf_folder(case)
    checkpoints.import_hf(source, tmp_path / "ours")
    ours, theirs = stored(tmp_path / "ours"), stored(source)
    with checkpoints.open_checkpoint(tmp_path / "ours") as ckpt:
        assert {n: tuple(t.shape) for n, t in ours.items()} == checkpoints.expected_tensors(ckpt.config)
    p, q = "decoder.layers.1.", "model.layers.1."
    qkv = torch.cat([theirs[f"{q}self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(ours[f"{p}self_attention.linear_qkv.weight"], qkv)
    if f"{p}mlp.linear_fc1.weight" in ours:
        fc1 = torch.cat([theirs[f"{q}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        assert torch.equal(ours[f"{p}mlp.linear_fc1.weight"], fc1)
    else:
        block, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2")
        if case.startswith("qwen"):
            block, gate, up, down = ("mlp", "gate_proj", "up_proj", "down_proj")
        for e, (fc1, fc2) in enumerate(
            zip(ours[f"{p}mlp.experts.linear_fc1.weight"], ours[f"{p}mlp.experts.linear_fc2.weight"])
        ):
            parts = [theirs[f"{q}{block}.experts.{e}.{x}.weight"] for x in (gate, up)]
            assert torch.equal(fc1, torch.cat(parts))
            assert torch.equal(fc2, theirs[f"{q}{block}.experts.{e}.{down}.weight"])


@pytest.mark.parametrize(
    "case", ["llama-tied-biases-llama3", "mixtral", "qwen3_moe-mixed-layers", "qwen2-windows-yarn"]
)
def test_transformers_loads_the_export(hf_folder: HFFolder, tmp_path: Path, case: str) -> None:
    source = hf_folder(case)
    checkpoints.import_hf(source, tmp_path / "ours")
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "back", max_shard_bytes=9000)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with warnings.catch_warnings(action="ignore"):
        a, b = load(source, dtype="auto"), load(tmp_path / "back", dtype="auto")
    assert_same_bits(a.state_dict(), b.state_dict())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(a(tokens).logits, b(tokens).logits)


def test_sharded_in_and_out(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("mixtral", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    checkpoints.import_hf(source, tmp_path / "single")
    checkpoints.import_hf(source, tmp_path / "sharded", max_shard_bytes=15000)
    assert [f.name for f in (tmp_path / "single").glob("*.safetensors*")] == ["model.safetensors"]
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    ours = stored(tmp_path / "sharded")
    assert set(index["weight_map"]) == set(ours)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "sharded" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 15000 or len(tensors) == 1
    assert_same_bits(stored(tmp_path / "single"), ours)
    checkpoints.export_hf(tmp_path / "sharded", tmp_path / "back")
    assert_same_bits(stored(source), stored(tmp_path / "back"))


def test_relayout_there_and_back(hf_folder: HFFolder, tmp_path: Path) -> None:
    checkpoints.import_hf(hf_folder("qwen3_moe"), tmp_path / "grouped")
    checkpoints.relayout(tmp_path / "grouped", tmp_path / "per-gemm", "per-gemm")
    checkpoints.relayout(tmp_path / "per-gemm", tmp_path / "again", "grouped")
    grouped, split = stored(tmp_path / "grouped"), stored(tmp_path / "per-gemm")
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert torch.equal(grouped[name], torch.stack([split[f"{name}{g}"] for g in range(4)]))
    assert_same_bits(grouped, stored(tmp_path / "again"))
    assert (tmp_path / "grouped/config.json").read_bytes() == (tmp_path / "again/config.json").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", torch.float64])
def test_dtype_conversion(hf_folder: HFFolder, tmp_path: Path, dtype: str | torch.dtype) -> None:
    source = hf_folder("mixtral")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    checkpoints.import_hf(source, tmp_path / "ours", dtype=dtype)
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "back")
    theirs, back = stored(source), stored(tmp_path / "back")
    assert_same_bits({n: t.to(wanted) for n, t in theirs.items()}, back)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "bf16", dtype="bfloat16")
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"


def test_weights_cannot_become_integers(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder()
    for dtype in (torch.int8, "int8", "no_such_dtype", torch.float8_e4m3fn):
        with pytest.raises(checkpoints.CheckpointError, match="cannot be converted"):
            checkpoints.import_hf(source, tmp_path / "ours", dtype=dtype)


def test_unknown_fields_and_a_tied_copy_survive_or_are_reported(llama: Path, tmp_path: Path, edit_json) -> None:
    edit_json(llama / "config.json", my_own_field={"a": [1, 2.5, None]}, torch_dtype="bfloat16", drop=("dtype",))
    checkpoints.import_hf(llama, tmp_path / "ours")
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "back")
    assert json.loads((llama / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def test_export_as_another_family(llama: Path, tmp_path: Path) -> None:
    checkpoints.import_hf(llama, tmp_path / "ours")
    checkpoints.export_hf(tmp_path / "ours", tmp_path / "mistral", family="mistral")
    config = json.loads((tmp_path / "mistral/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert config["sliding_window"] is None and config["eos_token_id"] == 2
    with checkpoints.open_checkpoint(llama) as a, checkpoints.open_checkpoint(tmp_path / "mistral") as b:
        assert a.config == b.config
    with pytest.raises(checkpoints.CheckpointError, match=r"qwen2.* cannot express attention.add_qkv_bias"):
        checkpoints.export_hf(tmp_path / "ours", tmp_path / "qwen2", family="qwen2")
    with pytest.raises(checkpoints.CheckpointError, match="'gpt9' is not supported"):
        checkpoints.export_hf(tmp_path / "ours", tmp_path / "gpt9", family="gpt9")


def test_dry_run_returns_the_plan_and_writes_nothing(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("mixtral")
    before = sorted(tmp_path.rglob("*"))
    plan = checkpoints.import_hf(source, tmp_path / "deep/er/ours", dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    values = plan.to_dict()
    moved = [name for output in values["outputs"] for name in output["from"]]
    assert sorted(moved) == sorted(stored(source)), "every source tensor is consumed exactly once"
    assert values["bytes"] == sum(t.nbytes for t in stored(source).values())
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in str(plan)
    checkpoints.import_hf(source, tmp_path / "deep/er/ours")
    assert set(stored(tmp_path / "deep/er/ours")) == {output["name"] for output in values["outputs"]}


def test_progress_counts_every_byte_once(hf_folder: HFFolder, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    plan = checkpoints.import_hf(hf_folder("mixtral"), tmp_path / "ours", progress=lambda *x: calls.append(x))
    assert calls == sorted(calls) and calls[-1] == (plan.total_bytes, plan.total_bytes)


def test_kinds_are_not_confused(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder()
    checkpoints.import_hf(source, tmp_path / "ours")
    with pytest.raises(checkpoints.CheckpointError, match="already a te_models folder"):
        checkpoints.import_hf(tmp_path / "ours", tmp_path / "x")
    with pytest.raises(checkpoints.CheckpointError, match="already a Hugging Face folder"):
        checkpoints.export_hf(source, tmp_path / "x")
    with pytest.raises(checkpoints.CheckpointError, match="is a Hugging Face folder"):
        checkpoints.relayout(source, tmp_path / "x", "per-gemm")
    with pytest.raises(checkpoints.CheckpointError, match="expert layout is 'diagonal'"):
        checkpoints.relayout(tmp_path / "ours", tmp_path / "x", "diagonal")
    assert not (tmp_path / "x").exists()
