"""DeepSeek-V4: published spellings of names and configuration, FP8 blocks with E8M0 scales, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf
from tests.checkpoints.compressed_cases import COMPRESSED
from tests.checkpoints.families.test_families import save, tokens
from tests.checkpoints.family_cases import SIZES, fill, make
from tests.checkpoints.hf_cases import assert_same_bits, stored, transformers

FAMILY = FAMILIES["deepseek_v4"]


def values_of(case: str) -> dict[str, Any]:
    return json.loads(make(case).config.to_json_string())


def published(name: str) -> str:
    """The published name of a tensor that transformers writes."""
    if name.startswith("model.hc_head."):
        return name.removeprefix("model.hc_head.").replace("hc_", "hc_head_")
    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


@torch.no_grad()
def test_published_names_are_read_and_written(tmp_path: Path) -> None:
    """With int64 tables, and with layers that predict further tokens, which come back as they came."""
    theirs = make("deepseek_v4")
    source = save(theirs, tmp_path / "saved")
    tensors = {published(name): tensor for name, tensor in stored(source).items()}
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn"} < tensors.keys()
    extra = {"mtp.0.attn.wq_a.weight": torch.randn(3), "mtp.0.ffn.gate.tid2eid": torch.ones(2, dtype=torch.int64)}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors | extra, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    import_hf(source, tmp_path / "ours")
    plan = import_hf(tmp_path / "hub", tmp_path / "hub-ours")
    assert set(plan.passthrough) == {f"carried.{name}" for name in extra}
    ours = {n: t for n, t in stored(tmp_path / "hub-ours").items() if not n.startswith("carried.")}
    assert_same_bits(ours, stored(tmp_path / "ours"))
    assert ours["decoder.layers.0.mlp.router.expert_of_token"].dtype == torch.int64
    export_hf(tmp_path / "hub-ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), tensors | extra)
    export_hf(tmp_path / "ours", tmp_path / "asked", form="published")
    assert_same_bits(stored(tmp_path / "asked"), tensors)
    expected = theirs(tokens(41)).logits
    got = GPTModel.from_pretrained(tmp_path / "hub").eval()(tokens(41)).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_published_fields_are_read_and_written() -> None:
    """`compress_ratios` of each layer, also of those behind the last, `num_hash_layers`, one set of rope parameters."""
    values = values_of("deepseek_v4-published-rates")
    config = FAMILY.read_config(values)
    dropped = ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")
    spelled = {name: value for name, value in values.items() if name not in dropped}
    spelled |= {"compress_ratios": [4, 0, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8}
    assert FAMILY.read_config(spelled) == config
    written = FAMILY.write_config(config)
    assert written["compress_ratios"] == [4, 0] and written["num_hash_layers"] == 1
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
    scaled = FAMILY.read_config(spelled | {"rope_scaling": yarn})
    theirs = transformers.AutoConfig.for_model(**{**spelled, "rope_scaling": yarn})
    assert FAMILY.read_config(json.loads(theirs.to_json_string())) == scaled
    assert scaled.rope.scaling == "none" and scaled.mixers["sparse"].rope.attention_factor == 1.0


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in 128 x 128 blocks as E4M3, the scales as E8M0, and the values."""
    rows, columns = ((size + 127) // 128 for size in weight.shape)
    data, scales, values = torch.empty_like(weight), torch.empty(rows, columns), torch.empty_like(weight)
    for r in range(rows):
        for c in range(columns):
            part = slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
            scale = torch.exp2(torch.ceil(torch.log2(weight[part].abs().max() / 448)))
            data[part] = (weight[part] / scale).to(torch.float8_e4m3fn).float()
            scales[r, c], values[part] = scale, data[part] * scale
    return data.to(torch.float8_e4m3fn), scales.to(torch.float8_e8m0fnu), values


@torch.no_grad()
def test_fp8_blocks_with_e8m0_scales(tmp_path: Path) -> None:
    """Of attention, with the output's groups, and of experts; compressors stay as they are, as published."""
    options = COMPRESSED["deepseek_v4"][1] | {"hidden_size": 128, "q_lora_rank": 128, "moe_intermediate_size": 128}
    options |= {"head_dim": 128, "o_lora_rank": 128, "intermediate_size": 128, "index_head_dim": 64}
    config = transformers.AutoConfig.for_model("deepseek_v4", **{**SIZES, **options})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    fill(theirs)
    source = save(theirs, tmp_path / "hf")
    plain, files = {}, {}
    kinds = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    for name, tensor in stored(source).items():
        files[name] = plain[name] = tensor
        if name.endswith(tuple(f"{kind}.weight" for kind in kinds)) and "indexer" not in name:
            files[name], files[f"{name}_scale_inv"], plain[name] = quantized(tensor)
    values = json.loads((source / "config.json").read_text())
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    for folder, tensors, more in (("fp8", files, {"quantization_config": said}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(values | more))
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
    import_hf(tmp_path / "fp8", tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), files)
    ids = tokens(41)
    expected = GPTModel.from_pretrained(tmp_path / "plain").eval()(ids).logits
    got = GPTModel.from_pretrained(tmp_path / "ours", dequantize=True).eval()(ids).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert GPTModel.from_pretrained(tmp_path / "ours").eval()(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False; supported: True"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2; supported: 1"),
        ({"attention_bias": True}, "attention_bias = True; supported: False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2; supported: 1"),
        ({"scoring_func": "tanh"}, "scoring_func = 'tanh'; supported: sqrtsoftplus, softmax, sigmoid"),
        ({"layer_types": ["full_attention"] * 4}, "the layer type 'full_attention'; supported: sliding_attention"),
        ({"layer_types": ["sliding_attention"]}, "1 layer_types and 4 layers"),
        ({"layer_types": None, "compress_ratios": [4, 8, 0, 0]}, "the compress ratio 8; supported: 0, 4, 128"),
        ({"mlp_layer_types": ["dense"] * 4}, "the MLP kind 'dense'; supported: hash_moe, moe"),
        ({"compress_rates": {"other": 3}}, "compress_rates = .*; allowed: compressed_sparse_attention"),
        ({"index_head_dim": 6}, "compressed.index_head_dim is 6; allowed: at least the 8 channels"),
        ({"o_groups": 3}, "compressed.o_groups is 3; allowed: a divisor of 4 heads"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FAMILY.read_config(values_of("deepseek_v4") | changes)
