"""The GEMM kernels compiled for compute capability 9.0: they fit, use the tensor cores, and keep sums in registers."""

import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from te_models.kernels.gemm import tile
from te_models.kernels.gemm import triton as dense
from te_models.kernels.gemm import triton as gemm_kernels
from te_models.kernels.grouped_gemm import triton as grouped
from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, compile_kernel, in_child, summary

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


SMALLER = 101376  # bytes of shared memory at compute capability 8.6, 8.9 and 12.0

Summaries = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def compiled() -> Summaries:
    """Compile all of them once: some minutes the first time."""
    return in_child("tests.kernels.triton.hopper.test_hopper")


@pytest.mark.slow
def test_every_program_fits(compiled: Summaries) -> None:
    """Its shared memory, and its sums in registers."""
    assert max(found["shared"] for found in compiled.values()) <= SHARED_MEMORY
    assert {name: found["stack"] for name, found in compiled.items() if found["stack"]} == {}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("narrow", [True, False])
def test_values_in_flight_fit_a_smaller_gpu(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the pipeline holds a stage less than it has; a wide tile's did not fit."""
    wide = []
    for memory in (SMALLER, SHARED_MEMORY):
        monkeypatch.setattr(tile, "shared_memory", lambda device, memory=memory: memory)
        for mode, rows in itertools.product((tile.NONE, tile.PER_TENSOR, tile.BLOCK_128, tile.MICRO), (1, 64, 4096)):
            right = side(mode)
            m, n, k, _, stages = tile.config(right, rows, 4096, narrow=narrow)
            assert (stages - 1) * (m + n) * k * right.data.element_size() <= memory
            wide += [memory] * (n > 128)
    assert wide == ([] if narrow else [SHARED_MEMORY] * 2)


@pytest.mark.slow
def test_tensor_cores_run_asynchronously(compiled: Summaries) -> None:
    """From 64 rows on; one product is in flight where no scales have to be applied to it first."""
    for name, found in compiled.items():
        if ", 16 rows" not in name and name != "transpose":
            assert found["wgmma"] > 0, name
            assert found["in_flight"] == (0 if "128-blocks" in name or "mxfp8" in name else 1), name


@pytest.mark.slow
def test_loads_are_asynchronous_copies_and_stores_are_wide(compiled: Summaries) -> None:
    for name, found in compiled.items():
        assert found["wide"] > 0, name
        assert (found["copies"] > 0) == (name != "transpose"), name


if __name__ == "__main__":
    found = cases()
    print(json.dumps({name: summary(compiled) for name, compiled in found.items()}))
