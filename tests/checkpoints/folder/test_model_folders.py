"""Live tensors in and out: load_into, save_model, quantized parameters, verify, inspect, manifest."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models.checkpoints import (
    CheckpointError,
    check_manifest,
    dequantize,
    expected_tensors,
    export_hf,
    import_hf,
    inspect,
    open_checkpoint,
    quantize,
    relayout,
    save_model,
    upcycle,
    verify,
)
from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.config import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.layers import GroupedTensor, QuantizedTensor, recipe
from tests.checkpoints.hf_cases import CASES, HFFolder, assert_same_bits, stored
from tests.compare import refused

RECIPES = ("current", "block", "mxfp8")
LAYOUTS = ("grouped", "per-gemm")
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, add_qkv_bias=True),
    mlp=MLPConfig(ffn_hidden_size=40),
    moe=MoEConfig(num_moe_experts=3, moe_router_topk=2, moe_ffn_hidden_size=36, layers=(1,)),
)


def random_params(config: ModelConfig, layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in expected_tensors(config, layout).items()}


def quantized_params(config: ModelConfig, layout: str, name: str) -> dict[str, torch.Tensor]:
    quantizer = recipe(name).weight_quantizer()
    params = random_params(config, layout)
    for key, value in params.items():
        if is_linear_weight(key):
            params[key] = quantizer.quantize_grouped(value) if value.dim() == 3 else quantizer.quantize(value)
    return params


def same_quantized(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
    return a.quantizer == b.quantizer and all(
        torch.equal(x.flatten().view(torch.uint8), b.fields[n].flatten().view(torch.uint8)) for n, x in a.fields.items()
    )


@pytest.mark.sentinels(
    "llama-grouped", "qwen2-tied-per-gemm", "mixtral-per-gemm", "qwen3_moe-grouped", "mixtral-tied-window-grouped"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_load_into_any_layout_and_dtype(hf_folder: HFFolder, tmp_path: Path, case: str, layout: str) -> None:
    source = hf_folder(case)
    import_hf(source, tmp_path / "ours", layout=layout)
    expected = stored(tmp_path / "ours")
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    relayout(tmp_path / "ours", tmp_path / "other", other)
    for folder in (source, tmp_path / "ours", tmp_path / "other"):
        with open_checkpoint(folder) as ckpt:
            for dtype in (torch.bfloat16, torch.float32):
                params = {n: torch.full(t.shape, float("nan"), dtype=dtype) for n, t in expected.items()}
                ckpt.load_into(params)
                assert_same_bits(params, {n: t.to(dtype) for n, t in expected.items()})


def test_load_into_refuses_a_different_model(llama: Path) -> None:
    with open_checkpoint(llama) as ckpt:
        params = {n: torch.zeros(s) for n, s in expected_tensors(ckpt.config).items()}
        with pytest.raises(CheckpointError, match=r"missing: 'decoder.final_layernorm.weight'; unknown: 'x'"):
            ckpt.load_into({("x" if "final" in n else n): t for n, t in params.items()})
        params["output_layer.weight"] = torch.zeros(61, 31)
        with pytest.raises(CheckpointError, match=r"output_layer.weight has shape \[61, 31\]; expected: \[61, 32\]"):
            ckpt.load_into(params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_and_load(tmp_path: Path, layout: str) -> None:
    params = random_params(CONFIG, layout)
    params["embedding.word_embeddings.weight"] = torch.randn(32, 61).T  # not contiguous
    save_model(params, CONFIG, tmp_path / "saved", max_shard_bytes=20_000)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    check_manifest(tmp_path / "saved")
    with open_checkpoint(tmp_path / "saved") as ckpt:
        assert (ckpt.config, ckpt.layout, ckpt.family, ckpt.kind) == (CONFIG, layout, None, "te_models")
        loaded = {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in params.items()}
        ckpt.load_into(loaded)
    assert_same_bits(loaded, {n: t.contiguous() for n, t in params.items()})


def test_save_checks_names_shapes_dtypes_and_destination(tmp_path: Path) -> None:
    params = random_params(CONFIG, "grouped")
    with pytest.raises(CheckpointError, match=r"missing: 'decoder.final"):
        save_model({n: t for n, t in params.items() if "final" not in n}, CONFIG, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"has dtype torch\.int64"):
        save_model(params | {"output_layer.weight": torch.zeros(61, 32, dtype=torch.int64)}, CONFIG, tmp_path / "x")
    with pytest.raises(CheckpointError, match="has shape"):
        save_model(params | {"output_layer.weight": torch.zeros(32, 61)}, CONFIG, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    save_model(params, CONFIG, tmp_path / "x")
    before = stored(tmp_path / "x")
    changed = params | {"output_layer.weight": torch.zeros(61, 32, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="exists; choose another destination or pass overwrite"):
        save_model(changed, CONFIG, tmp_path / "x")
    assert_same_bits(stored(tmp_path / "x"), before)
    save_model(changed, CONFIG, tmp_path / "x", overwrite=True)
    assert not stored(tmp_path / "x")["output_layer.weight"].any()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"], "nothing temporary is left"


def test_save_with_a_source_exports_with_its_configuration(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("qwen3")
    with open_checkpoint(source) as ckpt:
        params = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in expected_tensors(ckpt.config).items()}
        ckpt.load_into(params)
        save_model(params, ckpt.config, tmp_path / "saved", source_dir=source)
    export_hf(tmp_path / "saved", tmp_path / "back")
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    assert (tmp_path / "back/tokenizer.json").exists()


def test_a_model_from_scratch_exports_as_a_family_that_fits(tmp_path: Path) -> None:
    config = CONFIG.replace(moe=None, attention=AttentionConfig(num_attention_heads=4))
    save_model(random_params(config, "grouped", torch.float32), config, tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "hf")
    values = json.loads((tmp_path / "hf/config.json").read_text())
    assert (values["model_type"], values["dtype"], values["eos_token_id"]) == ("llama", "float32", None)
    assert verify(tmp_path / "saved", tmp_path / "hf").equal
    save_model(random_params(CONFIG, "grouped"), CONFIG, tmp_path / "moe")
    with pytest.raises(CheckpointError, match="no family can store this model"):
        export_hf(tmp_path / "moe", tmp_path / "x")
    some = config.replace(moe=CONFIG.moe)
    save_model(random_params(some, "grouped"), some, tmp_path / "some")
    with pytest.raises(CheckpointError, match=r"of the nearest, qwen3_moe cannot express [^;]*; mixtral "):
        export_hf(tmp_path / "some", tmp_path / "x")


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_parameters_round_trip_and_relayout(tmp_path: Path, name: str, layout: str) -> None:
    params = quantized_params(CONFIG, layout, name)
    save_model(params, CONFIG, tmp_path / "a", max_shard_bytes=8000)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    relayout(tmp_path / "a", tmp_path / "b", other)
    relayout(tmp_path / "b", tmp_path / "c", layout)
    assert_same_bits(stored(tmp_path / "a"), stored(tmp_path / "c"))
    assert verify(tmp_path / "a", tmp_path / "b").equal
    for folder, target in (("a", layout), ("b", layout), ("b", other), ("a", other)):
        fresh = {
            n: (t.clone().zero_() if isinstance(t, QuantizedTensor) else torch.empty_like(t))
            for n, t in quantized_params(CONFIG, target, name).items()
        }
        with open_checkpoint(tmp_path / folder) as ckpt:
            empty = dict(ckpt.empty_quantized(target))
            assert all(fresh[n].quantizer == t.quantizer and fresh[n].shape == t.shape for n, t in empty.items())
            assert {n for n, t in fresh.items() if isinstance(t, QuantizedTensor)} == set(empty)
            ckpt.load_into(fresh)
        for key, tensor in quantized_params(CONFIG, layout, name).items() if target == layout else ():
            if isinstance(tensor, QuantizedTensor):
                assert same_quantized(fresh[key], tensor), key
            else:
                assert torch.equal(fresh[key], tensor)
        if layout == "grouped" and target == "per-gemm":
            for key in (k for k, t in params.items() if isinstance(t, GroupedTensor)):
                assert all(same_quantized(fresh[f"{key}{g}"], m) for g, m in enumerate(params[key].members()))


def test_the_entries_of_a_quantized_parameter_are_named_as_documented(tmp_path: Path) -> None:
    save_model(quantized_params(CONFIG, "per-gemm", "mxfp8"), CONFIG, tmp_path / "a")
    with open_checkpoint(tmp_path / "a") as ckpt:
        p = "decoder.layers.1.mlp.experts.linear_fc1.weight2"
        assert {n: (ckpt.tensors[n].dtype, ckpt.tensors[n].shape) for n in ckpt.names if n.startswith(p)} == {
            p: ("F8_E4M3", (72, 32)),
            f"{p}_scale_inv": ("U8", (72, 1)),
            f"{p}_columnwise": ("F8_E4M3", (72, 32)),
            f"{p}_columnwise_scale_inv": ("U8", (3, 32)),
        }
        values = json.loads(ckpt.files.metadata["model.safetensors"]["te_models"])
        assert values["version"] == 1
        assert values["tensors"][p]["format"] == "mxfp8" and values["tensors"][p]["logical_dtype"] == "bfloat16"
        for info in ckpt.tensors.values():
            width = {"F32": 4, "BF16": 2}.get(info.dtype, 1)
            assert info.start % width == 0, "tensors are aligned to their element size"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", ["llama", "qwen3_moe-mixed-layers"])
def test_quantize_folder_equals_quantizing_in_memory(hf_folder: HFFolder, tmp_path: Path, case: str, name: str) -> None:
    source = hf_folder(case)
    import_hf(source, tmp_path / "ours")
    quantize(tmp_path / "ours", tmp_path / "direct", name)
    with open_checkpoint(source) as ckpt:
        quantizer = recipe(name).weight_quantizer()
        params = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in expected_tensors(ckpt.config).items()}
        ckpt.load_into(params)
        for key, value in params.items():
            if is_linear_weight(key):
                params[key] = quantizer.quantize_grouped(value) if value.dim() == 3 else quantizer.quantize(value)
        save_model(params, ckpt.config, tmp_path / "saved", source_dir=source)
        # loading high-precision files into quantized parameters quantizes the same way
        empty = {n: t.clone().zero_() for n, t in params.items()}
        ckpt.load_into(empty)
    for key, value in params.items():
        assert (
            same_quantized(empty[key], value) if isinstance(value, QuantizedTensor) else torch.equal(empty[key], value)
        )
    assert_same_bits(stored(tmp_path / "direct"), stored(tmp_path / "saved"))
    assert (tmp_path / "direct/config.json").read_bytes() == (tmp_path / "saved/config.json").read_bytes()
    plain = {n: torch.empty(s) for n, s in expected_tensors(params_config(tmp_path / "direct")).items()}
    with open_checkpoint(tmp_path / "direct") as ckpt:
        ckpt.load_into(plain)
    dequantize(tmp_path / "direct", tmp_path / "plain", dtype="float32")
    written = stored(tmp_path / "plain")
    for key, value in params.items():
        wanted = value.dequantize(torch.float32) if isinstance(value, QuantizedTensor) else value.float()
        assert torch.equal(plain[key], wanted) and torch.equal(written[key], wanted), key


def params_config(folder: Path) -> ModelConfig:
    with open_checkpoint(folder) as ckpt:
        return ckpt.config


def test_quantized_folders_are_not_exported_quantized_or_upcycled_silently(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "ours")
    quantize(tmp_path / "ours", tmp_path / "q", recipe("block"))
    with pytest.raises(
        CheckpointError,
        match=r"cannot be written as fp8: .* blocks of 128 rows; choose another format, or --allow-requantize",
    ):
        export_hf(tmp_path / "q", tmp_path / "x")
    for action in (
        lambda: quantize(tmp_path / "q", tmp_path / "x", "mxfp8"),
        lambda: upcycle(tmp_path / "q", tmp_path / "x", 2, 1),
    ):
        with pytest.raises(CheckpointError, match=r"has quantized weights .* dequantize it first"):
            action()
    refused(lambda: dequantize(tmp_path / "ours", tmp_path / "x"), "has no quantized weights", error=CheckpointError)
    assert not (tmp_path / "x").exists()


def edit_metadata(folder: Path, change) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as f:
        metadata = f.metadata()
    values = json.loads(metadata["te_models"])
    change(values)
    save_file(stored(folder), file, metadata={"te_models": json.dumps(values)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(version=2), "version 2"),
        (lambda v: v.update(tensors=[]), "does not map parameter names"),
        (
            lambda v: v["tensors"].pop("decoder.layers.0.mlp.linear_fc1.weight"),
            "linear_fc1.weight.* has dtype F8_E4M3|scale_inv",
        ),
        (
            lambda v: v["tensors"].update(ghost=v["tensors"]["decoder.layers.0.mlp.linear_fc1.weight"]),
            "not have: 'ghost'",
        ),
        (
            lambda v: v["tensors"]["decoder.layers.0.mlp.linear_fc1.weight"].update(format="float8"),
            "contradicts itself",
        ),
        (
            lambda v: v["tensors"]["decoder.layers.0.mlp.linear_fc1.weight"].update(logical_dtype="int8"),
            "logical_dtype",
        ),
        (lambda v: v["tensors"]["decoder.layers.0.mlp.linear_fc1.weight"].pop("quantizer"), "lacks a 'quantizer'"),
        (
            lambda v: v["tensors"]["decoder.layers.0.mlp.linear_fc1.weight"]["quantizer"].update(format="int3"),
            "describes no known quantizer",
        ),
    ],
)
def test_bad_quantization_metadata_is_refused(llama: Path, tmp_path: Path, change, message: str) -> None:
    import_hf(llama, tmp_path / "ours")
    quantize(tmp_path / "ours", tmp_path / "q", "mxfp8")
    edit_metadata(tmp_path / "q", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "q")


def test_members_quantized_differently_cannot_be_grouped(tmp_path: Path) -> None:
    params = quantized_params(CONFIG, "per-gemm", "mxfp8")
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight1"
    params[name] = recipe("block").weight_quantizer().quantize(params[name].dequantize())
    refused(lambda: save_model(params, CONFIG, tmp_path / "x"), "are quantized differently", error=CheckpointError)
    assert not (tmp_path / "x").exists()


def test_verify_names_the_first_differing_element(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("mixtral")
    import_hf(source, tmp_path / "a")
    with open_checkpoint(source) as ckpt:
        params = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in expected_tensors(ckpt.config).items()}
        ckpt.load_into(params)
        config = ckpt.config
    name = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    old = params[name][2, 5, 7].item()
    params[name][2, 5, 7] = 42.0
    params[name][3, 1, 1] = 43.0
    params["decoder.final_layernorm.weight"] = params["decoder.final_layernorm.weight"].float()
    save_model(params, config.replace(hidden_dropout=0.5), tmp_path / "b")
    report = verify(tmp_path / "a", tmp_path / "b")
    assert not report.equal
    assert report.differences == [
        "config: hidden_dropout: 0.0 and 0.5",
        f"{name}[2, 5, 7]: {old} and 42.0",
        "decoder.final_layernorm.weight: BF16 [32] and F32 [32]",
    ]
    assert json.loads(json.dumps(report.to_dict()))["equal"] is False and "42.0" in str(report)


def test_verify_sees_negative_zero_and_nan_bits(tmp_path: Path) -> None:
    params = random_params(CONFIG, "grouped", torch.float32)
    params["output_layer.weight"][0, 0] = 0.0
    params["output_layer.weight"][0, 1] = float("nan")
    save_model(params, CONFIG, tmp_path / "a")
    save_model(params, CONFIG, tmp_path / "same")
    params["output_layer.weight"][0, 0] = -0.0
    save_model(params, CONFIG, tmp_path / "b")
    assert verify(tmp_path / "a", tmp_path / "same").equal
    assert verify(tmp_path / "a", tmp_path / "b").differences == ["output_layer.weight[0, 0]: 0.0 and -0.0"]


def test_verify_of_different_models(hf_folder: HFFolder) -> None:
    report = verify(hf_folder("llama"), hf_folder("qwen2-tied"))
    assert any("linear_qkv.bias: only in" in d for d in report.differences)
    assert any(d.startswith("config: ") for d in report.differences)


def test_verify_names_each_parameter_of_another_format_once(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "mxfp8", "mxfp8")
    quantize(tmp_path / "plain", tmp_path / "block", "block")
    report = verify(tmp_path / "plain", tmp_path / "mxfp8")
    assert len(report.differences) == 8 and report.tensors == 7
    assert all(": not quantized and {" in d and "'format': 'mxfp8'" in d for d in report.differences)
    assert "'float8_block'" in verify(tmp_path / "mxfp8", tmp_path / "block").differences[0]


def test_inspect(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("mixtral")
    upcycled = inspect(source)
    total = sum(t.numel() for t in stored(source).values())
    expert = sum(t.numel() for n, t in stored(source).items() if ".experts." in n)
    assert (upcycled.kind, upcycled.family, upcycled.layout) == ("hf", "mixtral", None)
    assert (upcycled.parameters, upcycled.active_parameters) == (total, total - expert // 2)
    assert upcycled.dtypes == {"BF16": len(stored(source))} and upcycled.formats == {}
    import_hf(source, tmp_path / "ours", max_shard_bytes=30_000)
    quantize(tmp_path / "ours", tmp_path / "q", "block")
    found = inspect(tmp_path / "q")
    assert (found.kind, found.family, found.layout, found.parameters) == ("te_models", "mixtral", "grouped", total)
    assert found.formats == {"float8_block": 8}
    values = json.loads(json.dumps(found.to_dict(tensors=True)))
    assert values["tensors"]["decoder.final_layernorm.weight"] == {"dtype": "BF16", "shape": [32]}
    assert "4 experts, top 2" in str(found) and "float8_block: 8 parameters" in str(found)


def test_weight_files_without_an_index(hf_folder: HFFolder, tmp_path: Path) -> None:
    """Numbered shards, files of any name, or one file: the headers say which tensors they hold."""
    whole, folder = hf_folder("llama"), tmp_path / "hf"
    hf_folder("mixtral", max_shard_size="20KB").rename(folder)
    import_hf(folder, tmp_path / "reference")
    (folder / "model.safetensors.index.json").unlink()
    import_hf(folder, tmp_path / "numbered")
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(folder / f"part {number}.safetensors")
    assert number > 3
    import_hf(folder, tmp_path / "named")
    for name in ("numbered", "named"):
        assert_same_bits(stored(tmp_path / name), stored(tmp_path / "reference"))
    (whole / "model.safetensors").rename(whole / "weights.safetensors")
    import_hf(whole, tmp_path / "one")
    export_hf(tmp_path / "one", tmp_path / "back")
    assert_same_bits(stored(whole), stored(tmp_path / "back"))


def test_the_index_decides_which_copy_of_a_tensor_counts(hf_folder: HFFolder, tmp_path: Path) -> None:
    """A later file replaces a tensor that an earlier shard still holds."""
    folder = hf_folder("llama", max_shard_size="20KB")
    import_hf(folder, tmp_path / "reference")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    old_file = folder / index["weight_map"][name]
    tensors = load_file(old_file)
    save_file({name: tensors[name].clone()}, folder / "overlay.safetensors")
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, old_file)
    index["weight_map"][name] = "overlay.safetensors"
    path.write_text(json.dumps(index))
    import_hf(folder, tmp_path / "overlaid")
    assert_same_bits(stored(tmp_path / "overlaid"), stored(tmp_path / "reference"))
