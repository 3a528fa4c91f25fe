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


# Which dimension of left, right and their scales is contiguous, as the quantizers lay their copies out: "k", the
# contracted one, or the "outer" one.
LAYOUTS: dict[str, dict[str, tuple[str, str, str, str]]] = {
    "bf16": {"fprop": ("k", "k", "", ""), "dgrad": ("k", "outer", "", ""), "wgrad": ("outer", "outer", "", "")},
    "per tensor": {"fprop": ("k", "k", "", ""), "wgrad": ("k", "k", "", "")},
    "128-blocks": {
        "fprop": ("k", "k", "k", "k"),
        "dgrad": ("k", "k", "k", "outer"),
        "wgrad": ("k", "k", "outer", "outer"),
    },
    "mxfp8": {
        "fprop": ("k", "k", "k", "k"),
        "dgrad": ("k", "outer", "k", "outer"),
        "wgrad": ("outer", "outer", "outer", "outer"),
    },
}


def units(kernel: Any, name: str, product: str) -> list[str]:
    """Return the names of the strides that are 1, the output's among them."""
    left, right, contracted = "nkt" if "a_t" in kernel.arg_names else "mnk"
    sides = zip(("a", "b", "sa", "sb"), (left, right) * 2, LAYOUTS[name][product], strict=True)
    found = [f"{side}_{contracted if contiguous == 'k' else outer}" for side, outer, contiguous in sides if contiguous]
    return [*found, f"o_{right}"]


def compiled_launch(
    capability: int, kernel: Any, name: str, product: str, rows: int = 4096, split: bool = True, added: bool = False
) -> Any:
    """Compile `kernel` for a format, a product and about `rows` rows. added: to what the output holds."""
    mode, values, scales, blocks = FORMATS[name]
    tiles = tile.config(side(mode), rows, 4096, narrow=added or (split and mode == tile.PER_TENSOR))
    blocks, out = (1, "*fp32") if product == "wgrad" else (blocks, "*bf16")
    types = dict.fromkeys(kernel.arg_names, "i32") | {"a_ptr": values, "b_ptr": values, "out_ptr": out}
    types |= {"splits_ptr": "*i64", "ends_ptr": "*i64"}
    types |= {} if scales is None else {"sa_ptr": scales, "sb_ptr": scales}
    constants = {"MODE": mode, "SPLIT": split and mode == tile.PER_TENSOR, "DOT": tile.dot_dtype(side(mode))}
    constants |= {"GROUP_M": tile.GROUP_M, "GROUPS": 128, "ROWS_A": 1, "ROWS_B": blocks, "ACCUMULATE": added}
    constants |= {"ROW_BLOCK": grouped._ROW_BLOCK[mode], "bias_ptr": None, "factor_ptr": None} | tiles._asdict()
    constants |= dict.fromkeys(units(kernel, name, product), 1) | (
        {"sa_ptr": None, "sb_ptr": None} if scales is None else {}
    )
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    # the rows of a dense weight gradient are output features, of which there are a multiple of 16
    any_multiple = ("G", "T") if product == "wgrad" else ("M", "G", "T")
    return compile_kernel(kernel, types, constants, tiles.num_warps, tiles.num_stages, capability, any_multiple)


def cases(capability: int = 90) -> dict[str, Any]:
    """Return {case: compiled kernel}."""
    found, launch = {}, partial(compiled_launch, capability)
    tile.shared_memory = lambda device: SHARED_MEMORY
    for name, products in LAYOUTS.items():
        forward, wgrad = grouped.grouped_gemm_fwd_kernel, grouped.grouped_gemm_wgrad_kernel
        for which, kernel in {"grouped": forward, "dense": dense.scaled_gemm_fwd_kernel}.items():
            if which == "dense" and name == "bf16":  # torch's
                continue
            for rows in ROWS:
                found[f"{which} {name}, {rows} rows"] = launch(kernel, name, "fprop", rows)
                if name == "per tensor":
                    found[f"{which} {name}, {rows} rows, fast"] = launch(kernel, name, "fprop", rows, split=False)
            if "dgrad" in products:
                found[f"{which} {name}, dgrad"] = launch(kernel, name, "dgrad")
            kernel = wgrad if which == "grouped" else kernel
            found[f"{which} {name}, wgrad"] = launch(kernel, name, "wgrad")
            found[f"{which} {name}, wgrad added"] = launch(kernel, name, "wgrad", added=True)
    kernel = gemm_kernels.copy_transposed_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"x_ptr": "*u8", "out_ptr": "*u8"}
    found["transpose"] = compile_kernel(kernel, types, {"x_r": 1, "o_c": 1, "BLOCK": 128}, 8, 3, capability)
    return found


if __name__ == "__main__":
    found = cases()
    print(json.dumps({name: summary(compiled) for name, compiled in found.items()}))
