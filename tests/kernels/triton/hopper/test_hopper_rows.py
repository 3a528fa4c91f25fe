"""The kernels that are no GEMM compiled for compute capability 9.0: they fit, and sums keep their order."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from te_models.kernels.activation import triton as activation
from te_models.kernels.activation import triton_quantized as activation_quantized
from te_models.kernels.activation.reference import ActivationKind
from te_models.kernels.cross_entropy import triton as cross_entropy
from te_models.kernels.norm import triton as norm
from te_models.kernels.norm import triton_backward as norm_backward
from te_models.kernels.norm import triton_quantized as norm_quantized
from te_models.kernels.permute import triton as permute
from te_models.kernels.permute import triton_quantized as permute_quantized
from te_models.kernels.permute import triton_sort
from te_models.kernels.quantize import triton_output
from te_models.kernels.quantize.output import QuantizedOutput
from te_models.kernels.rope import triton as rope
from te_models.kernels.router import triton as router
from tests.kernels.triton.hopper.compiler import SHARED_MEMORY, in_child, summary

pytestmark = pytest.mark.slow

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
BOTH = {"rowwise": True, "columnwise": True}
OUTPUTS = {
    "per tensor": QuantizedOutput(**BOTH),
    "per tensor, rows": QuantizedOutput(),
    "128-blocks": QuantizedOutput(block=128, **BOTH),
    "128-blocks, rows": QuantizedOutput(block=128),
    "mxfp8": QuantizedOutput(block=32, scale_kind="e8m0", **BOTH),
    "mxfp8, rows": QuantizedOutput(block=32, scale_kind="e8m0"),
}


def specialised(
    kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any], dict[str, Any]]:
    """Return types, constants, alignments and options of `kernel[grid](*arguments, **named)` as specialised."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        fixed = not parameter.do_not_specialize and not parameter.is_constexpr
        if isinstance(value, Tensor):
            signature[parameter.name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (value == 1 and fixed and isinstance(value, int)):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if fixed and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes, values


def compile_launch(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], capability: int = 90) -> Any:
    """Compile `kernel[grid](*arguments, **named)` as triton would specialise it."""
    *parts, options = specialised(kernel, arguments, named)
    return compile(ASTSource(kernel, *parts), target=GPUTarget("cuda", capability, 32), options=options)


def launches() -> Iterator[tuple[Any, ...]]:
    """Yield (case, launcher, its arguments)."""
    tokens, hidden = 64, 4096
    x, weight = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(hidden, dtype=torch.bfloat16)
    mean, rows, probabilities = torch.zeros(tokens), x[:, :2048], torch.zeros(tokens)
    labels, scale = torch.zeros(tokens, dtype=torch.int64), torch.ones(())
    for centered in (False, True):
        flags, kind = (centered, False, not centered), "layer norm" if centered else "rms norm"
        bias = weight if centered else None
        yield kind, norm.norm_fwd, x, weight, bias, 1e-5, *flags, torch.bfloat16
        yield f"{kind} backward", norm_backward.norm_bwd, x, x, weight, mean, mean, *flags, torch.float32, None
        for name, output in OUTPUTS.items():
            given = scale if output.block == 0 else None
            options = (1e-5, *flags, torch.bfloat16, given, output)
            yield f"{kind}, {name}", norm_quantized.norm_quantized, x, weight, bias, *options
    slots = torch.zeros(tokens, 8, dtype=torch.int64)
    swiglu = ActivationKind("silu", gated=True)
    yield "swiglu", activation.activation_fwd, x, probabilities, swiglu
    yield "swiglu backward", activation.activation_bwd, rows, x, probabilities, swiglu, True
    for name, output in OUTPUTS.items():
        given = scale if output.block == 0 else None
        yield f"swiglu, {name}", activation_quantized.activation_quantized, x, None, swiglu, given, output
        yield f"permute, {name}", permute_quantized.permute_quantized, x, slots.flatten(), 8, given, output
    yield "sort", triton_sort.sort_by_expert, slots, 128, 128
    yield "permute", permute.permute_rows, x, slots, labels
    yield "unpermute", permute.sum_slots, x, slots, probabilities[:, None].expand(-1, 8)
    y = x.new_zeros(tokens * 9, hidden)
    yield "unpermute backward", permute.unpermute_bwd, x, y, torch.zeros(tokens, 8), slots, labels, True
    heads, angles = x.view(1, tokens, 32, 128), torch.zeros(1, tokens, 64)
    for interleaved in (False, True):
        yield f"rope, {interleaved}", rope.rope, heads, angles, angles, interleaved, False
    yield "partial rope", rope.rope, heads, angles[..., :16], angles[..., :16], False, True
    logits = torch.zeros(tokens, 256)
    for limited in ((None, None), (8, 4)):
        options = (8, True, False, True, 0.0, 2.5, *limited, True)
        yield f"router, {limited}", router.router_topk_fwd, logits, logits[0], *options
    yield "router backward", router.router_topk_bwd, mean, logits, slots, False, False, True, 0.0, 1.0
    words = torch.zeros(tokens, 128_256, dtype=torch.bfloat16)
    yield "cross entropy", cross_entropy.cross_entropy_fwd, words, labels
    yield "cross entropy backward", cross_entropy.cross_entropy_bwd, words, labels, mean, mean
    yield "cross entropy in place", cross_entropy.cross_entropy_grad_, words, labels, scale, scale, scale
    yield "scaled", cross_entropy.scaled_in_float32, x, scale


def orders_of_sums(compiled: Any) -> list[str]:
    """Return how the terms of each sum of float32 lie in threads, which decides the order of the additions."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#blocked\d*) = (.*)$", text, re.MULTILINE))
    return [f"{shape} {layouts[name]}" for shape, name in re.findall(r"\}\) : \(tensor<(\w+xf32), (#\w+)>\)", text)]


def main() -> dict[str, dict[str, Any]]:
    """Compile the launches of all cases."""
    found: dict[str, dict[str, Any]] = {}
    case = ""

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        compiled = compile_launch(kernel, arguments, named)
        found[f"{case}: {kernel.__name__}"] = summary(compiled) | {"sums": orders_of_sums(compiled)}

    JITFunction.run = run
    triton_output.native_fp8 = lambda device: True
    for case, launcher, *arguments in launches():  # noqa: B007 - `run` reads the case
        launcher(*arguments)
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Compile all of them once: some minutes the first time."""
    found = in_child("tests.kernels.triton.hopper.test_hopper_rows")
    assert len(found) > 50
    return found


def test_every_program_fits(compiled) -> None:
    assert max(found["shared"] for found in compiled.values()) <= SHARED_MEMORY
    assert {name: found["stack"] for name, found in compiled.items() if found["stack"]} == {}


def test_what_moves_most_moves_wide(compiled) -> None:
    """16 bytes a load or store, but where a program works on a few numbers of each token."""
    assert [name for name, found in compiled.items() if not found["wide"] and not name.startswith("sort")] == []


def test_transposed_copies_are_stored_wide(compiled) -> None:
    """Where there are a multiple of 16 rows. A kernel that is not told stores them one byte at a time."""
    stores = {name: found["bytes"] for name, found in compiled.items() if name.endswith("quantize_kernel")}
    assert len(stores) >= 20
    # one byte of a scale
    assert {name: count for name, count in stores.items() if count > 1} == {}


@pytest.mark.parametrize("kind", ["rms norm", "layer norm"])
def test_statistics_are_summed_in_one_order_whatever_the_result_is(compiled, kind) -> None:
    """Otherwise the quantized result would not be the plain one's, bit for bit."""
    order = compiled[f"{kind}: norm_fwd_kernel"]["sums"]
    assert len(order) == (2 if kind == "layer norm" else 1)
    others = {
        name: found["sums"]
        for name, found in compiled.items()
        if name.startswith(f"{kind}, ") and (name.endswith("norm_fwd_kernel") or ", rows:" in name)
    }
    assert len(others) == 6 and others == dict.fromkeys(others, order)


def test_no_compiler_chooses_what_is_rounded(compiled) -> None:
    """A LayerNorm of 5120 float32 columns was quantized from other last bits than those of its plain result."""
    forward = {name: found["fused"] for name, found in compiled.items() if re.search(r"norm_(fwd|quantize)_", name)}
    assert len(forward) >= 20 and forward == dict.fromkeys(forward, 0)


if __name__ == "__main__":
    print(json.dumps(main()))
