"""Compile the dequantization of grouped rows for compute capability 9.0 and print what came of it, see hopper.py."""

from __future__ import annotations

import json
from typing import Any

from te_models.kernels.quantize.fp8 import triton_grouped as grouped
from tests.kernels.triton.hopper.compiler import compile_kernel, summary

BLOCKS = {
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


if __name__ == "__main__":
    found = {name: summary(launch(block, "32" in name)) for name, block in BLOCKS.items()}
    print(json.dumps(found))
