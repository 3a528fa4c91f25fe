"""Compile every GEMM kernel as launched on compute capability 9.0 and print what came of it, as JSON.

A program of its own, see hopper.py. The cases are the launches: their tiles come from `config`, and every format has
the operands' layout that its launcher guarantees.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

from te_models.kernels.gemm import tile
from te_models.kernels.gemm import triton as dense
from te_models.kernels.gemm import triton as gemm_kernels
from te_models.kernels.grouped_gemm import triton as grouped
from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, compile_kernel, summary

# name: mode, values, scales, rows of the right side's blocks
FORMATS = {
    "bf16": (tile.NONE, "*bf16", None, 1),
    "per tensor": (tile.PER_TENSOR, "*fp8e4nv", "*fp32", 1),
    "128-blocks": (tile.BLOCK_128, "*fp8e4nv", "*fp32", 128),
    "mxfp8": (tile.MICRO, "*fp8e4nv", "*u8", 1),
}
ROWS = (16, 64, 4096)


def side(mode: int) -> Any:
    """Stand in for a TileOperand on a GPU, as far as `config` and `dot_dtype` look at it."""
    data = SimpleNamespace(is_cuda=True, device=None, element_size=lambda: 2 if mode == 0 else 1)
    return SimpleNamespace(mode=mode, data=data)


def compiled_launch(
    capability: int, kernel: Any, name: str, rows: int, split: bool, out: str, units: tuple[str, ...], **more: Any
) -> Any:
    """Compile `kernel` for a format and about `rows` rows. units: the strides that are 1; more: its own constants."""
    mode, values, scales, blocks = FORMATS[name]
    accumulates = more.get("ACCUMULATE", False)
    tiles = tile.config(side(mode), rows, 4096, narrow=accumulates or (split and mode == tile.PER_TENSOR))
    types = dict.fromkeys(kernel.arg_names, "i32") | {"a_ptr": values, "b_ptr": values, "out_ptr": out}
    types |= {"splits_ptr": "*i64", "ends_ptr": "*i64"}
    types |= {} if scales is None else {"sa_ptr": scales, "sb_ptr": scales}
    constants = {"MODE": mode, "SPLIT": split and mode == tile.PER_TENSOR, "DOT": tile.dot_dtype(side(mode))}
    constants |= {"GROUP_M": tile.GROUP_M, "GROUPS": 128, "ROWS_A": 1, "ROWS_B": blocks, "ACCUMULATE": False}
    constants |= {"ROW_BLOCK": grouped._ROW_BLOCK[mode], "bias_ptr": None, "factor_ptr": None} | tiles._asdict() | more
    constants |= dict.fromkeys(units, 1) | ({"sa_ptr": None, "sb_ptr": None} if scales is None else {})
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return compile_kernel(kernel, types, constants, tiles.num_warps, tiles.num_stages, capability)


def cases(capability: int = 90) -> dict[str, Any]:
    """Return {case: compiled kernel}."""
    found, launch = {}, partial(compiled_launch, capability)
    tile.shared_memory = lambda device: SHARED_MEMORY
    for name in FORMATS:
        for rows in ROWS:
            for split in (True, False) if name == "per tensor" else (True,):
                label = f"{name}, {rows} rows" + ("" if split else ", fast")
                kernel = grouped.grouped_gemm_fwd_kernel
                found[f"grouped {label}"] = launch(kernel, name, rows, split, "*bf16", ("a_k", "b_k", "o_n"))
                if name != "bf16":
                    kernel = dense.scaled_gemm_fwd_kernel
                    found[f"dense {label}"] = launch(kernel, name, rows, split, "*bf16", ("a_k", "b_k", "o_n"))
        # rows of bfloat16 and MX copies lie along the other dimension, those of the other formats along T
        units = ("a_n", "b_k", "o_k") if name in ("bf16", "mxfp8") else ("a_t", "b_t", "o_k")
        blocks = {"ROWS_B": 1}
        kernel = grouped.grouped_gemm_wgrad_kernel
        found[f"wgrad {name}"] = launch(kernel, name, 4096, True, "*fp32", units, **blocks)
        found[f"wgrad {name} added"] = launch(kernel, name, 4096, True, "*fp32", units, ACCUMULATE=True, **blocks)
    kernel = grouped.grouped_gemm_fwd_kernel
    found["grouped bf16, 4096 rows, dgrad"] = launch(kernel, "bf16", 4096, True, "*bf16", ("a_k", "b_n", "o_n"))
    kernel = gemm_kernels.copy_transposed_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"x_ptr": "*u8", "out_ptr": "*u8"}
    found["transpose"] = compile_kernel(kernel, types, {"x_r": 1, "o_c": 1, "BLOCK": 128}, 8, 3, capability)
    return found


if __name__ == "__main__":
    found = cases()
    print(json.dumps({name: summary(compiled) for name, compiled in found.items()}))
