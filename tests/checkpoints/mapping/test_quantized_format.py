"""Quantized parameters of every format in safetensors files: bit for bit, in either expert layout, or a clear error."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from te_models.checkpoints import CheckpointError, open_checkpoint, relayout, save_model
from te_models.checkpoints.io.dtypes import dtype_name
from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.checkpoints.mapping.quantized_format import (
    field_specs,
    quantized_metadata,
    read_metadata,
    rebuild,
    stored_fields,
    write_metadata,
)
from te_models.layers import GroupedRows, GroupedTensor, NVFP4Quantizer, Quantizer
from tests.build import weight_quantizers
from tests.checkpoints.folder.test_model_folders import CONFIG, LAYOUTS, random_params
from tests.compare import same_bits

FORMATS: dict[str, Quantizer] = weight_quantizers() | {"nvfp4_rht": NVFP4Quantizer(with_rht=True)}


@pytest.mark.parametrize("shape", [(40, 72), (3, 40, 72), (1, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_safetensors_file_restores_every_bit(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    quantizer, x = FORMATS[name], torch.randn(shape).to(torch.bfloat16)
    tensor = quantizer.quantize(x) if len(shape) == 2 else quantizer.quantize_grouped(x)
    entries = stored_fields("w", tensor)
    meta = quantized_metadata(quantizer, tensor.dtype)
    file = tmp_path / "w.safetensors"
    save_file({n: t.contiguous() for n, t in entries.items()}, file, metadata=write_metadata({"w": meta}))
    with safe_open(file, "pt") as opened:
        found = read_metadata(opened.metadata(), "w.safetensors")["w"]
    specs = field_specs("w", shape, found)
    loaded = load_file(file)
    assert {f"w{suffix}": (spec.shape, spec.dtypes) for suffix, spec in specs.items()} == {
        n: (tuple(t.shape), {dtype_name(t.dtype)}) for n, t in loaded.items()
    }
    again = rebuild("w", loaded, shape, found)
    assert type(again) is type(tensor) and (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert again.quantizer == quantizer and same_bits(again, tensor)


@pytest.mark.sentinels(
    "float8-grouped", "float8_block-per-gemm", "mxfp8_2d-grouped", "nvfp4_rht-per-gemm", "identity-per-gemm"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_folder_restores_every_bit_in_either_layout(name: str, layout: str, tmp_path: Path) -> None:
    quantizer = FORMATS[name]
    params = random_params(CONFIG, layout)
    for key, value in params.items():
        if is_linear_weight(key):
            params[key] = quantizer.quantize_grouped(value) if value.dim() == 3 else quantizer.quantize(value)
    save_model(params, CONFIG, tmp_path / "a")
    relayout(tmp_path / "a", tmp_path / "b", LAYOUTS[1 - LAYOUTS.index(layout)])
    for folder in ("a", "b"):
        fresh = {n: torch.empty_like(t).zero_() for n, t in params.items()}
        with open_checkpoint(tmp_path / folder) as ckpt:
            ckpt.load_into(fresh)
        for key, tensor in params.items():
            if is_linear_weight(key):
                assert isinstance(fresh[key], GroupedTensor) == (tensor.dim() == 3)
                assert same_bits(fresh[key], tensor), key
            else:
                assert torch.equal(fresh[key], tensor)


def test_rows_of_groups_are_no_parameters() -> None:
    rows = GroupedRows.quantize_rows(torch.randn(8, 32), torch.tensor([3, 5]), FORMATS["mxfp8"])
    with pytest.raises(CheckpointError, match="w is a GroupedRows; only weights"):
        stored_fields("w", rows)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "nvfp4"])  # its 16x16 blocks are for weights
def test_rows_of_groups_pass_through_safetensors_by_field(name: str, tmp_path: Path) -> None:
    quantizer = FORMATS[name]
    rows = GroupedRows.quantize_rows(torch.randn(40, 72), torch.tensor([7, 0, 30]), quantizer)
    fields = {name: field.contiguous() for name, field in (rows.fields | {"m_splits": rows.m_splits}).items()}
    save_file(fields, tmp_path / "rows.safetensors")
    loaded = load_file(tmp_path / "rows.safetensors")
    again = GroupedRows.rebuild(loaded, Quantizer.from_dict(quantizer.to_dict()), rows.shape, rows.dtype)
    assert same_bits(again, rows) and torch.equal(again.m_splits, rows.m_splits)
    with pytest.raises(ValueError, match=r"the field rowwise_data is .*; expected: "):
        GroupedRows.rebuild(loaded | {"rowwise_data": loaded["m_splits"]}, quantizer, rows.shape, rows.dtype)
