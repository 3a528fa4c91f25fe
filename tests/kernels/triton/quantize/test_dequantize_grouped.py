"""Dequantizing grouped rows: the definition against each group by itself, the kernel against the definition."""

import json
from typing import Any

import pytest
import torch

from te_models.kernels import quantize as q
from te_models.kernels.quantize.fp8 import triton_grouped as grouped
from te_models.kernels.quantize.fp8.dequantize_grouped import definition, dequantize_grouped
from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, compile_kernel, in_child, summary
from tests.kernels.triton.quantize.quantize_cases import BLOCKS, E4M3, E5M2, SPLITS, assert_bitwise, ordinary

COMPILED = {
    "per group": None,
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "32x1": (32, 1),
}


def launch(block: tuple[int, int] | None, e8m0: bool) -> Any:
    kernel = grouped.dequantize_grouped_kernel
    br, bc = block or (1, 1)
    types = dict.fromkeys(kernel.arg_names, "i32") | {"data_ptr": "*u8", "out_ptr": "*bf16", "m_splits_ptr": "*i64"}
    types |= {"scale_ptr": "*u8" if e8m0 else "*fp32"}
    constants = {"G": 128, "G_BLOCK": 128, "BR": br, "BC": bc, "PER_GROUP": block is None, "E8M0": e8m0, "E4M3": True}
    constants |= {"TILE_R": max(grouped.TILE_R, br), "TILE_C": max(grouped.TILE_C, bc), "stride_c": 1}
    return compile_kernel(kernel, types, constants, 4, 3)


COPIES = [(block, kind) for block, kind in BLOCKS] + [((c, r), kind) for (r, c), kind in BLOCKS if r != c]
CASES = [(splits, rows, columns) for (splits, rows) in SPLITS for columns in (40, 200)]


def quantized(x: torch.Tensor, m_splits: torch.Tensor, block: tuple[int, int], kind: str) -> list[torch.Tensor]:
    across = block[0] <= block[1]
    rowwise = block if across else (block[1], block[0])
    return q.quantize_grouped_blockwise(x, m_splits, rowwise, E4M3, kind, rowwise=across, columnwise=not across)


@pytest.mark.parametrize(("block", "kind"), COPIES, ids=str)
@pytest.mark.parametrize(("splits", "rows", "columns"), CASES, ids=str)
def test_each_group_is_by_itself(splits: list[int], rows: int, columns: int, block: tuple[int, int], kind: str) -> None:
    x, m_splits = ordinary((rows, columns), torch.float32), torch.tensor(splits)
    found = dequantize_grouped(*quantized(x, m_splits, block, kind), m_splits, rows, block, torch.float32)
    begin = 0
    for m in splits:
        group = q.quantize_blockwise(x[begin : begin + m], block, E4M3, kind)
        assert_bitwise(found[begin : begin + m], q.dequantize_blockwise(*group, block, torch.float32))
        begin += m
    assert found.shape == x.shape and not found[begin:].any()


def run(
    rows: int, splits: list[int], block: tuple[int, int] | None, kind: str, columns: int, device: torch.device
) -> None:
    from te_models.kernels.quantize.fp8 import triton_grouped

    x, m_splits = ordinary((rows, columns), torch.float32), torch.tensor(splits)
    for dtype in (torch.float32, torch.bfloat16):
        if block is None:
            fp8 = E5M2 if dtype == torch.float32 else E4M3
            scale = q.scale_from_amax(q.grouped_amax(x, m_splits), fp8)
            (data,) = q.quantize_grouped_per_tensor(x, m_splits, scale, fp8, columnwise=False)
            fields = [data, torch.div(torch.ones_like(scale), scale)]
        else:
            fields = quantized(x, m_splits, block, kind)
        expected = definition(*fields, m_splits, rows, block, dtype)
        for data in (fields[0], fields[0].mT.contiguous().mT):
            moved = [t.to(device) for t in (data, fields[1], m_splits)]
            assert_bitwise(triton_grouped.dequantize_grouped_fp8(*moved, rows, block, dtype), expected)


@pytest.mark.sentinels("[64]-64-(1, 32)-e8m0", "[5, 0, 30]-40-(1, 128)-pow2", "[0, 0, 0]-0-(32, 32)-e8m0")
@pytest.mark.parametrize(("block", "kind"), [(None, ""), *COPIES], ids=str)
@pytest.mark.parametrize(("splits", "rows"), SPLITS, ids=str)
def test_kernel_equals_definition(
    splits: list[int], rows: int, block: tuple[int, int] | None, kind: str, device: torch.device, poisoned: None
) -> None:
    run(rows, splits, block, kind, 200, device)


@pytest.mark.slow
def test_kernel_compiles_for_a_gpu_with_wide_accesses_and_no_spills() -> None:
    for name, found in in_child("tests.kernels.triton.quantize.test_dequantize_grouped").items():
        assert found["stack"] == 0 and found["wide"] > 0 and found["shared"] <= SHARED_MEMORY, (name, found)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "kind"), [(None, ""), *COPIES], ids=str)
def test_kernel_on_many_rows(block: tuple[int, int] | None, kind: str, device: torch.device) -> None:
    run(3000, [1000, 0, 1, 129, 1700], block, kind, 1024, device)


if __name__ == "__main__":
    found = {name: summary(launch(block, "32" in name)) for name, block in COMPILED.items()}
    print(json.dumps(found))
