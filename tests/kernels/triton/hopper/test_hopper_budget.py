"""What the kernels take of a GPU stays within budget.json: registers, spills, shared memory, wide stores.

`python -m tests.kernels.triton.hopper.test_hopper_budget --write` rewrites the budget."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from te_models.kernels.norm import triton as norm
from te_models.kernels.norm import triton_backward as norm_backward
from te_models.kernels.quantize import triton_output
from te_models.kernels.quantize.fp8 import triton_blockwise, triton_tensor
from te_models.kernels.quantize.nvfp4 import triton as nvfp4
from te_models.kernels.quantize.nvfp4 import triton_decode
from tests.kernels.triton.hopper import test_hopper as gemm_programs
from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, in_child, resources
from tests.kernels.triton.hopper.test_hopper_rows import compile_launch, launches

BUDGET = Path(__file__).with_name("budget.json")
CAPABILITIES = (90, 100)
Resources = dict[str, Any]


def long_norms() -> Iterator[tuple[Any, ...]]:
    """Yield (case, launcher, its arguments) of norms over 16384 columns."""
    x, statistics = torch.zeros(64, 16384, dtype=torch.bfloat16), torch.zeros(64)
    weight = x[0]
    for centered in (False, True):
        flags, kind = (centered, False, not centered), "layer norm" if centered else "rms norm"
        bias, bias_grad = (weight, torch.bfloat16) if centered else (None, None)
        yield f"{kind}, long", norm.norm_fwd, x, weight, bias, 1e-5, *flags, torch.bfloat16
        arguments = (x, x, weight, statistics, statistics, *flags, torch.bfloat16, bias_grad)
        yield f"{kind} backward, long", norm_backward.norm_bwd, *arguments


def quantizers() -> Iterator[tuple[Any, ...]]:
    """Yield (case, launcher, its arguments) of quantizing 4096 columns, and back."""
    x, e4m3, scale = torch.zeros(128, 4096, dtype=torch.bfloat16), torch.float8_e4m3fn, torch.ones(())
    amax, key = torch.ones(()), torch.zeros(2, dtype=torch.int64)
    yield "amax", triton_tensor.amax, x
    yield "cast per tensor", triton_tensor.quantize_per_tensor, x, scale, e4m3
    yield "cast per tensor, both", partial(triton_tensor.quantize_per_tensor, columnwise=True), x, scale, e4m3
    data = torch.zeros(128, 4096, dtype=torch.uint8).view(e4m3)
    yield "dequantize per tensor", triton_tensor.dequantize_fp8, data, scale, None, torch.bfloat16
    yield "dequantize 1x128", triton_tensor.dequantize_fp8, data, torch.ones(128, 32), (1, 128), torch.bfloat16
    for name, block, kind in (("1x128", (1, 128), "pow2"), ("128x128", (128, 128), "pow2"), ("1x32", (1, 32), "e8m0")):
        yield f"cast {name}", triton_blockwise.quantize_blockwise, x, block, e4m3, kind, 0.0
        both = partial(triton_blockwise.quantize_blockwise, columnwise=True)
        yield f"cast {name}, both", both, x, block, e4m3, kind, 0.0
    yield "cast nvfp4", nvfp4.quantize_nvfp4, x, amax, None
    yield "cast nvfp4, both, stochastic", partial(nvfp4.quantize_nvfp4, with_rht=True, key=key), x, amax, amax
    packed, scales = torch.zeros(128, 2048, dtype=torch.uint8), torch.zeros(128, 256, dtype=torch.uint8).view(e4m3)
    yield "dequantize nvfp4", triton_decode.dequantize_nvfp4, packed, scales, amax, 4096, torch.bfloat16


def rows(capability: int, only: str) -> Iterator[tuple[str, Resources]]:
    """Yield the resources of each kernel that is no GEMM, in the cases whose names contain `only`."""
    found: list[tuple[str, Resources]] = []
    case = ""

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        found.append((f"{case}: {kernel.__name__}", resources(compile_launch(kernel, arguments, named, capability))))

    def tuned(tuner: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        """Compile the smallest and the largest tile that fit."""
        given = dict(zip(tuner.arg_names, arguments, strict=False))
        configs = tuner.early_config_prune(tuner.configs, given, **named)
        for config in {str(config): config for config in (configs[0], configs[-1])}.values():
            compiled = compile_launch(tuner.fn, arguments, named | config.all_kwargs(), capability)
            sizes = ", ".join(f"{key} {value}" for key, value in config.all_kwargs().items())
            found.append((f"{case}: {tuner.fn.__name__}, {sizes}", resources(compiled)))

    JITFunction.run, Autotuner.run = run, tuned
    for module in (triton_output, triton_blockwise, triton_tensor, nvfp4):
        module.native_fp8 = lambda device: True
    for case, launcher, *arguments in (*launches(), *long_norms(), *quantizers()):
        if only in case:
            launcher(*arguments)
            yield from found
            found.clear()


def measured(capabilities: tuple[int, ...], only: str) -> dict[str, dict[str, Resources]]:
    """Return {capability: {case: resources}}, as JSON has it."""
    found = {}
    for capability in capabilities:
        found[str(capability)] = dict(rows(capability, only))
        if not only:
            gemms = gemm_programs.cases(capability).items()
            found[str(capability)] |= {name: resources(compiled) for name, compiled in gemms}
    return json.loads(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite budget.json")
    parser.add_argument("--only", default="", help="cases whose names contain this, for 9.0")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write takes all cases; allowed: without --only")
    capabilities = CAPABILITIES[:1] if options.only else CAPABILITIES
    found = {"triton": triton.__version__, "kernels": measured(capabilities, options.only)}
    if options.write:
        parts = []
        for capability, kernels in found["kernels"].items():
            lines = (f"   {json.dumps(name)}: {json.dumps(taken)}" for name, taken in kernels.items())
            parts.append(f'  "{capability}": {{\n' + ",\n".join(lines) + "\n  }")
        text = f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n' + ",\n".join(parts) + "\n }\n}\n"
        assert json.loads(text) == found
        BUDGET.write_text(text)
    else:
        print(json.dumps(found))


PROGRAM = "tests.kernels.triton.hopper.test_hopper_budget"
# What still spills at the benchmarked shapes, in bytes of a thread: addresses, and one tile of several that the
# autotuner times.
SPILLS = {
    ("100", "grouped mxfp8, 4096 rows"): 8,
    ("100", "cast nvfp4, both, stochastic: quantize_nvfp4_kernel, TILE_R 32, TILE_C 64"): 48,
}
# numbers per row, or per part of a row, and an amax, which is added atomically
NARROW = ("column_sum", "norm_bwd_sums", "sort_", "router_topk_fwd", "cross_entropy_fwd", "amax_kernel")


@pytest.fixture(scope="module")
def budget() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("budget.json").read_text())


def hold(found: dict[str, Any], budget: dict[str, Any]) -> None:
    """Compare measured resources with the budget; registers only where the same compiler assigned them."""
    same = found["triton"] == budget["triton"]
    over = {}
    for capability, kernels in found["kernels"].items():
        allowed = budget["kernels"][capability]
        for name, taken in kernels.items():
            if name not in allowed and not same:
                continue  # another compiler's autotuner may prune other tiles
            most = allowed[name]
            worse = taken["spilled"] > most["spilled"] or taken["shared"] > most["shared"]
            worse = worse or (same and (taken["registers"] > most["registers"] or taken["stores"] != most["stores"]))
            if worse:
                over[f"{capability} {name}"] = taken
    assert over == {}


def test_the_budget_fits_and_spills_no_more_than_is_known(budget) -> None:
    assert budget["kernels"].keys() == {"90", "100"}
    spills = {}
    for capability, kernels in budget["kernels"].items():
        assert len(kernels) > 100
        for name, taken in kernels.items():
            assert taken["shared"] <= SHARED_MEMORY, name
            if taken["spilled"]:
                spills[capability, name.partition(", num_warps")[0]] = taken["spilled"]
    assert spills == SPILLS


def test_the_budget_stores_16_bytes_at_once(budget) -> None:
    """But where a kernel writes a few numbers of each row, as a norm that leaves its result to a second kernel."""
    for kernels in budget["kernels"].values():
        for name, taken in kernels.items():
            kernel = name.partition(": ")[2]
            statistics = kernel == "norm_fwd_kernel" and "norm, " in name and "long" not in name
            assert "16" in taken["stores"] or statistics or kernel.startswith(NARROW), name


@pytest.mark.slow
def test_a_backward_pass_of_long_rows_keeps_to_it(budget) -> None:
    """Over 16384 columns a program that held whole rows spilled 80 to 232 bytes per thread."""
    found = in_child(PROGRAM, "--only", "rms norm backward, long")
    assert len(found["kernels"]["90"]) == 3
    hold(found, budget)


@pytest.mark.slow
def test_every_kernel_keeps_to_it(budget) -> None:
    found = in_child(PROGRAM)
    if found["triton"] == budget["triton"]:
        assert found["kernels"].keys() == budget["kernels"].keys()
        for capability, kernels in found["kernels"].items():
            assert kernels.keys() == budget["kernels"][capability].keys()
    hold(found, budget)


if __name__ == "__main__":
    main()
