"""Folders that the compressed-tensors package itself writes, taken over and given back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import export_hf, import_hf
from tests.checkpoints.hf_cases import assert_same_bits, stored, there_and_back, transformers

pytest.importorskip("compressed_tensors", reason="it writes the folders: te_models[test]")
compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")
utils = pytest.importorskip("compressed_tensors.quantization.utils")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def extremes(weight: torch.Tensor, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest numbers of what shares a scale."""
    if given.strategy == "tensor":
        parts, dims = weight[None], (1, 2)
    elif given.strategy == "channel":
        parts, dims = weight, (1,)
    elif given.strategy == "block":
        rows, columns = given.block_structure
        parts, dims = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)), (1, 3)
    else:
        parts, dims = weight.unflatten(1, (-1, given.group_size)), (2,)
    return parts.amin(dims), parts.amax(dims)


def write(folder: Path, preset: str) -> None:
    """Save a model as the package compresses it by one of its schemes, or the MLP by a second one."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES), dtype=torch.bfloat16)
    bound = max(float(p.detach().abs().max()) for p in model.parameters())
    targets = (["Linear"], ["re:.*mlp.*"])  # of the second of two presets
    schemes = map(quantization.preset_name_to_scheme, preset.split(" and "), targets)
    groups = {f"group_{i}": scheme for i, scheme in enumerate(schemes)}
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    )
    for module in model.modules():
        given = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if given is None:
            continue
        factor = None
        if given.strategy == "tensor_group":  # one for all, where the tool has one for what is fused on loading
            factor = utils.generate_gparam(torch.tensor(-bound), torch.tensor(bound))
            module.weight_global_scale.data.fill_(float(factor))
        scales, zeros = utils.calculate_qparams(*extremes(module.weight.data, given), given, global_scale=factor)
        module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
        if not given.symmetric:
            module.weight_zero_point.data.copy_(zeros.reshape(module.weight_scale.shape).round())
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the values that the package decodes."""
    options = transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=options
    ).state_dict()


@pytest.mark.sentinels("FP8_BLOCK-True", "NVFP4A16-True", "W4A16_ASYM-True")
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("preset", "exact"),
    [
        ("FP8_BLOCK", True),
        ("FP8_DYNAMIC", False),
        ("NVFP4A16", True),
        ("MXFP4A16", True),
        ("MXFP8A16", True),
        ("W4A16", True),
        ("W4A16_ASYM", True),
        ("W8A16", True),
    ],
)
def test_what_the_package_writes_is_read(tmp_path: Path, preset: str, exact: bool) -> None:
    write(tmp_path / "hf", preset)
    expected = decoded(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "values", dequantize=True, dtype="bfloat16")
    export_hf(tmp_path / "values", tmp_path / "plain")
    found = stored(tmp_path / "plain")
    assert_same_bits(found, {name: expected[name].contiguous() for name in found})
    if exact:
        assert_same_bits(stored(there_and_back(tmp_path / "hf", tmp_path)), stored(tmp_path / "hf"))


@pytest.mark.parametrize("presets", ["W4A16 and FP8_BLOCK", "W8A16 and W4A16_ASYM"])
def test_a_folder_of_two_schemes_stays_one(tmp_path: Path, presets: str) -> None:
    """transformers 5.23 decodes every group as the first one, so the values are not compared."""
    write(tmp_path / "hf", presets)
    assert_same_bits(stored(there_and_back(tmp_path / "hf", tmp_path)), stored(tmp_path / "hf"))
    declared = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in ("hf", "back")]
    assert declared[0] == declared[1] and len(declared[0]["config_groups"]) == 2
