"""DeepSeek-V4: published spellings of names and configuration, FP8 blocks with E8M0 scales, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf, quantize, toy
from te_models.layers import Float8CurrentScaling, QuantizedTensor
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
    model = GPTModel.from_pretrained(tmp_path / "hub").eval()
    got = model(tokens(41)).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    model.save_pretrained(tmp_path / "again")
    assert_same_bits(stored(tmp_path / "again"), stored(tmp_path / "hub-ours"))


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


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix as E2M1, two in a byte, with the scales of 32 as E8M0, and the values."""
    blocks = weight.unflatten(-1, (-1, 32))
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1) / 6)))
    codes = (blocks / scales[..., None] - E2M1[:, None, None, None]).abs().argmin(0)
    values = (E2M1[codes] * scales[..., None]).flatten(-2)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return (
        (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8).view(torch.int8),
        scales.to(torch.float8_e8m0fnu),
        values,
    )


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
MTP = "mtp.0.ffn.experts.0.w1"


def write(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized_folders(tmp_path: Path, *, scale: str, fp4: bool, form: str) -> tuple[Path, Path]:
    """A folder in FP8 blocks, perhaps with FP4 experts, and one of the same values. Compressors stay as they are, as
    published; a weight of the layers that predict further tokens is quantized, too."""
    options = COMPRESSED["deepseek_v4"][1] | {"hidden_size": 128, "q_lora_rank": 128, "moe_intermediate_size": 128}
    options |= {"head_dim": 128, "o_lora_rank": 128, "intermediate_size": 128, "index_head_dim": 64}
    options |= {
        "num_hidden_layers": 2,
        "layer_types": options["layer_types"][:2],
        "mlp_layer_types": ["hash_moe", "moe"],
    }
    config = transformers.AutoConfig.for_model("deepseek_v4", **{**SIZES, **options})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    fill(theirs)
    source = save(theirs, tmp_path / "hf")
    rename = published if form == "published" else lambda name: name
    plain, files = {}, {}
    kinds = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    for name, tensor in {**stored(source), f"{MTP}.weight": torch.randn(128, 128)}.items():
        name = rename(name)
        files[name] = plain[name] = tensor
        if name.endswith(tuple(f"{kind}.weight" for kind in kinds)) and "indexer.compressor" not in name:
            numbers = packed if fp4 and ".experts." in name else quantized
            files[name], files[name.removesuffix("weight") + scale], plain[name] = numbers(tensor)
    values = json.loads((source / "config.json").read_text())
    said = {"quantization_config": FP8} | ({"expert_dtype": "fp4"} if fp4 else {})
    return write(tmp_path / "fp8", values | said, files), write(tmp_path / "plain", values, plain)


@pytest.mark.parametrize(
    ("scale", "fp4", "form"),
    [
        ("scale", True, "published"),  # as on the hub
        pytest.param("scale", False, "published", marks=pytest.mark.slow),
        pytest.param("weight_scale_inv", False, "saved", marks=pytest.mark.slow),
        pytest.param("weight_scale_inv", True, "saved", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_fp8_blocks_and_fp4_experts(tmp_path: Path, scale: str, fp4: bool, form: str) -> None:
    """Both names of scales, and of the layers that predict further tokens what an export without a declaration has."""
    source, plain = quantized_folders(tmp_path, scale=scale, fp4=fp4, form=form)
    plan = import_hf(source, tmp_path / "ours")
    assert set(plan.passthrough) == {f"carried.{MTP}.weight", f"carried.{MTP}.{scale}"}
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), stored(source))
    values = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == values
    ids = tokens(41)
    expected = GPTModel.from_pretrained(plain).eval()(ids).logits
    got = GPTModel.from_pretrained(tmp_path / "ours", dequantize=True).eval()(ids).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert GPTModel.from_pretrained(tmp_path / "ours").eval()(ids).logits.isfinite().all()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    assert (theirs.eval()(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    export_hf(tmp_path / "ours", tmp_path / "values", dequantize=True)
    assert_same_bits(stored(tmp_path / "values"), stored(plain))
    left = json.loads((tmp_path / "values/config.json").read_text())
    assert "quantization_config" not in left and "expert_dtype" not in left
    import_hf(source, tmp_path / "at-once", dequantize=True)
    export_hf(tmp_path / "at-once", tmp_path / "at-once-back")
    assert_same_bits(stored(tmp_path / "at-once-back"), stored(plain))


@pytest.mark.slow
@torch.no_grad()
def test_an_export_in_fp8_has_the_names_of_scales_of_its_form(tmp_path: Path) -> None:
    _, plain = quantized_folders(tmp_path, scale="scale", fp4=False, form="published")
    import_hf(plain, tmp_path / "ours")
    quantize(tmp_path / "ours", tmp_path / "ours-fp8", "block")
    names = {}
    for form in ("published", "saved"):
        export_hf(tmp_path / "ours-fp8", tmp_path / form, form=form)
        names[form] = {name for name in stored(tmp_path / form) if "scale" in name and "hc_" not in name}
        import_hf(tmp_path / form, tmp_path / f"{form}-ours")
        assert_same_bits(stored(tmp_path / "ours-fp8"), stored(tmp_path / f"{form}-ours"))
    assert "layers.0.attn.wq_a.scale" in names["published"]
    assert all(name.endswith(".scale") for name in names["published"])
    assert all(name.endswith(".weight_scale_inv") for name in names["saved"])


@torch.no_grad()
def test_a_part_of_a_folder_with_the_hub_s_scales(tmp_path: Path) -> None:
    source, _ = quantized_folders(tmp_path, scale="scale", fp4=True, form="published")
    toy(source, tmp_path / "toy", layers=1)
    found, whole = stored(tmp_path / "toy"), stored(source)
    assert all(torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)) for name, tensor in found.items())
    assert {"layers.0.ffn.experts.0.w1.scale", f"{MTP}.scale"} < found.keys()
    import_hf(tmp_path / "toy", tmp_path / "ours")


@torch.no_grad()
def test_weights_are_quantized_as_they_are_read(tmp_path: Path) -> None:
    """Also the stack of groups that is no stack of experts."""
    import_hf(save(make("deepseek_v4"), tmp_path / "hf"), tmp_path / "ours")
    plain = dict(GPTModel.from_pretrained(tmp_path / "ours").stored_tensors())
    model = GPTModel.from_pretrained(tmp_path / "ours", recipe=Float8CurrentScaling())
    name = "decoder.layers.0.self_attention.linear_o_down.weight"
    read = dict(model.stored_tensors())[name]
    assert isinstance(read, QuantizedTensor)
    assert (read.dequantize() - plain[name]).abs().max() <= 2**-4 * plain[name].abs().max()


@torch.no_grad()
def test_fp4_experts_that_config_json_does_not_declare(tmp_path: Path) -> None:
    source, _ = quantized_folders(tmp_path, scale="scale", fp4=True, form="published")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "expert_dtype": None}))
    with pytest.raises(CheckpointError, match=r"holds FP4 .* 'expert_dtype': 'fp4'"):
        import_hf(source, tmp_path / "ours")


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
