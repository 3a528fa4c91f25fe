"""Folders of integers beyond what all formats share: orders of columns, nf4, partial training, wrong tensors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import import_hf, inspect
from te_models.checkpoints.io.errors import CheckpointError
from tests.checkpoints.hf_cases import assert_same_bits, refused, stored, there_and_back
from tests.checkpoints.integer_cases import GPTQ_CONFIG, NF4_CONFIG, gptq, group_of, nf4, packed
from tests.checkpoints.quantized.test_quantized_hf import assert_values
from tests.checkpoints.quantized_cases import CASES, Case, compressed, edit_config, make

ONLY_VALUES = {
    "gptq by importance": Case("qwen3_moe", gptq(4, 64, ordered=False), GPTQ_CONFIG | {"desc_act": True}),
    "packed by importance": Case(
        "qwen3", packed(4, 32, shuffled=True), compressed("pack-quantized", **group_of(4, 32, actorder="group"))
    ),
    "packed zeros by importance": Case(
        "qwen3",
        packed(8, 64, zero_points=True, shuffled=True),
        compressed("pack-quantized", **group_of(8, 64, zero_points=True)),
    ),
    "nf4": Case("qwen3", nf4(False), NF4_CONFIG),
    "nf4 nested": Case("qwen3_moe", nf4(True), NF4_CONFIG),
}


@pytest.mark.sentinels("packed zeros by importance", "nf4")
@pytest.mark.parametrize("case", ONLY_VALUES)
def test_what_no_fields_hold_has_values(tmp_path: Path, case: str) -> None:
    source, reference = make(ONLY_VALUES[case], tmp_path, torch.float32)
    why = "no form of ours has such scales" if "nf4" in case else "its groups are not runs of columns"
    with refused(rf"{why}.*--allow-requantize .*--dequantize stores values", tmp_path):
        import_hf(source, tmp_path / "x")
    plan = import_hf(source, tmp_path / "values", dequantize=True)
    assert plan.report is not None and "dequantized" in str(plan.report)
    assert_values(tmp_path / "values", reference, case)
    again = import_hf(source, tmp_path / "int8", storage="int8", allow_requantize=True)
    assert all(line.max_error for line in again.report.lines.values() if line.kind == "requantized")
    assert set(inspect(tmp_path / "int8").formats) == {"int8"}


def test_groups_in_order_may_say_so(tmp_path: Path) -> None:
    """`desc_act` and a g_idx that is none: the numbers are taken over."""
    source, _ = make(replace(CASES["gptq"], config=GPTQ_CONFIG | {"desc_act": True}), tmp_path)
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_shape", torch.tensor([256, 128]), r"weight_shape' is \[256, 128\], and its weight has \[256, 256\]"),
        ("weight_packed", torch.zeros(256, 31, dtype=torch.int32), "weight_packed"),
        ("weight_scale", torch.full((256, 8), float("nan")).bfloat16(), "has a scale that is NaN or infinite"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, name: str, value: torch.Tensor, message: str) -> None:
    case = Case("qwen3", packed(4, 32), compressed("pack-quantized", **group_of(4, 32)))
    source, _ = make(case, tmp_path)
    tensors = stored(source) | {f"model.layers.1.mlp.down_proj.{name}": value}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with refused(message, tmp_path):
        import_hf(source, tmp_path / "x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ_CONFIG | {"bits": 3}, "has bits = 3; supported: 4, 8"),
        (NF4_CONFIG | {"load_in_4bit": False}, "has load_in_4bit = False; supported: True"),
        (compressed("pack-quantized", **group_of(5, 32)), "has num_bits = 5; supported: 4, 8"),
        (compressed("pack-quantized", **group_of(4, 48)), "has group_size = 48; supported: 32, 64"),
        (compressed("int-quantized", **group_of(8, None)), "has format = 'int-quantized'; supported: nvfp4"),
    ],
)
def test_other_declarations_are_refused_by_name(tmp_path: Path, config: dict, message: str) -> None:
    source, _ = make(CASES["pack-quantized-int8-channel"], tmp_path)
    edit_config(source, quantization_config=config)
    with refused(message, tmp_path):
        import_hf(source, tmp_path / "x")


def test_a_folder_of_several_formats_is_not_stored_as_one(tmp_path: Path) -> None:
    source, _ = make(CASES["mixed-precision-quantized"], tmp_path)
    with pytest.raises(CheckpointError, match="a folder of several formats cannot be stored as 'float8_block'"):
        import_hf(source, tmp_path / "x", storage="float8_block")
    assert set(inspect(source).formats) == {"pack-quantized", "float-quantized"}


def test_weights_of_two_formats_are_not_joined(tmp_path: Path) -> None:
    known = CASES["mixed-precision-quantized"]
    groups = {
        "group_0": known.config["config_groups"]["group_0"],
        "group_1": {"targets": ["re:.*q_proj$"], "format": "pack-quantized", "weights": group_of(8, 64)},
    }
    encode = packed(4, 32)
    eight = packed(8, 64)
    case = Case(
        "qwen3",
        lambda name, *rest: (eight if "q_proj" in name else encode)(name, *rest),
        known.config | {"config_groups": groups},
    )
    source, _ = make(case, tmp_path)
    with refused("are in formats of their own.*2 such parameters", tmp_path):
        import_hf(source, tmp_path / "x")
