"""Scaled GEMM: the emulation against float64, which backend is chosen and why, counters, layouts for the library."""

import functools

import pytest
import torch

from te_models.kernels import gemm
from te_models.kernels import quantize as q
from te_models.kernels.custom_op import flatten
from te_models.kernels.gemm import backends as backends
from te_models.kernels.gemm.backends import DeviceCapability
from te_models.kernels.gemm.choice import choose_gemm
from te_models.kernels.gemm.op import _scaled_gemm
from tests.compare import refused
from tests.kernels.gemm.scaled_cases import E5M2, SIDES, assert_within, exact, normal, quantized

H100 = DeviceCapability("cuda", (9, 0), True, (13, 0))
B200 = DeviceCapability("cuda", (10, 0), True, (13, 0))
A100 = DeviceCapability("cuda", (8, 0), True, (13, 0))
ALL = SIDES | {"nvfp4": (("nvfp4", None), ("nvfp4", None))}


def pair(sides: str, shape: tuple[int, int, int]) -> tuple[gemm.ScaledOperand, gemm.ScaledOperand]:
    rows, columns, length = shape
    left, right = ALL[sides]
    return quantized(normal(rows, length, seed=1), *left), quantized(normal(columns, length, seed=2), *right)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_scaled_in_place_with_the_bits_of_the_arithmetic(
    out_dtype: torch.dtype, dtype: torch.dtype, bias: bool
) -> None:
    """By some rows at a time, of which the last may be fewer; its operands keep their values."""
    with gemm.using_cpu_gemm("bf16"):
        for rows in (0, 1, 255, 256, 257, 600):
            left, right, scale = torch.randn(rows, 64).to(dtype), torch.randn(64, 96).to(dtype), torch.rand(()) + 0.1
            added = torch.randn(96).to(out_dtype) if bias else None
            operands = gemm.reference.Operand(left, scale), gemm.reference.Operand(right, None)
            kept = left.clone(), right.clone()
            product = torch.mm(left, right).float() * scale
            wanted = (product if added is None else product + added).to(out_dtype)
            with torch.no_grad():
                found = gemm.reference.gemm(*operands, out_dtype, added)
            assert found.dtype == out_dtype and torch.equal(found, wanted)
            assert torch.equal(kept[0], left) and torch.equal(kept[1], right)
            scales, product = torch.rand(rows), torch.mm(left, right)
            wanted = (product.float() * scales[:, None]).to(out_dtype)
            with torch.no_grad():
                assert torch.equal(gemm.reference.scaled(product, scales[:, None], out_dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 2), (17, 33, 40), (3, 130, 258), (5, 7, 0), (0, 4, 8)], ids=str)
@pytest.mark.parametrize("sides", ALL)
def test_emulation(sides: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if 0 in shape and sides == "nvfp4":
        shape = (shape[0] or 1, shape[1], shape[2] or 2)  # the amax of nothing is not defined
    left, right = pair(sides, shape)
    bias = normal(shape[1], seed=3)
    a, b = exact(left), exact(right)
    a, b = torch.cat((a, a.new_ones(len(a), 1)), 1), torch.cat((b, bias.double()[:, None]), 1)
    # the product, product times scales, and the sum with the bias are rounded
    assert_within(gemm.scaled_gemm(left, right, dtype, bias), a, b, roundings=3)


def test_transposed_views_have_the_same_numbers() -> None:
    x = normal(64, 150, seed=4)
    for kind, block in (("per_tensor", None), ("pow2", (1, 128)), ("e8m0", (32, 32))):
        operand = quantized(x, kind, block)
        assert torch.equal(exact(operand.mT), exact(operand).mT)
        assert torch.equal(operand.mT.mT.data.view(torch.uint8), operand.data.view(torch.uint8))
    with pytest.raises(ValueError, match="packed NVFP4 values cannot be transposed"):
        _ = quantized(x, "nvfp4", None).mT


RUNGS = [
    ("per_tensor", (64, 64, 64), H100, "native"),
    ("per_tensor", (64, 60, 64), H100, "triton"),
    ("per_tensor", (64, 64, 64), A100, "emulation"),
    ("pow2 1x128 by 128x128", (64, 64, 128), H100, "native"),
    ("pow2 1x128 by 128x128", (63, 64, 128), H100, "triton"),
    ("pow2 1x128 by 128x128", (64, 64, 144), H100, "triton"),
    ("pow2 1x128 by 128x128", (64, 64, 128), B200, "triton"),
    ("pow2 1x128 by 128x128", (64, 64, 128), H100._replace(cuda=(12, 8)), "triton"),
    ("float32 1x128 by 128x128", (64, 64, 128), H100._replace(cuda=(12, 8), triton=False), "emulation"),
    ("mxfp8", (64, 64, 128), H100, "triton"),
    ("mxfp8", (64, 64, 128), B200, "native"),
    ("mxfp8 1x32 by 32x32", (64, 64, 128), B200, "native"),
    ("nvfp4", (64, 64, 128), B200, "native"),
    ("nvfp4", (64, 64, 128), H100, "emulation"),
    ("per_tensor", (64, 64, 64), DeviceCapability("cpu"), "emulation"),
]


@pytest.mark.parametrize(("sides", "shape", "hw", "backend"), RUNGS, ids=str)
def test_backends(sides: str, shape: tuple[int, int, int], hw: DeviceCapability, backend: str) -> None:
    choice = choose_gemm(*pair(sides, shape), torch.bfloat16, hw)
    assert choice.backend == backend and choice.fallback == (backend == "emulation" and hw.type == "cuda")
    ladder = ["native", "triton", "emulation"]
    assert [name for name, _ in choice.passed_over] == ladder[: ladder.index(backend)]


def test_what_no_backend_multiplies_is_emulated() -> None:
    left, right = normal(64, 128, seed=1), normal(64, 128, seed=2)
    block, whole = quantized(left, "pow2", (1, 128)), quantized(right, "per_tensor", None)
    assert choose_gemm(block, whole, torch.bfloat16, H100).backend == "emulation"
    squares = quantized(left, "pow2", (128, 128)), quantized(right, "pow2", (128, 128))
    assert choose_gemm(*squares, torch.bfloat16, H100).backend == "triton"
    gradients = quantized(left, "per_tensor", None, E5M2), quantized(right, "per_tensor", None, E5M2)
    assert choose_gemm(*gradients, torch.bfloat16, H100).backend == "triton"


def test_explanation_counts_one_warning_and_strictness() -> None:
    left, right = pair("nvfp4", (32, 32, 64))
    cpu = "it needs a CUDA device, this is cpu"
    expected = f"scaled_gemm runs as emulation; not native: {cpu}; not triton: {cpu}"
    for backend, more in (("bf16", ""), ("float32", "; this CPU multiplies the dequantized values in float32")):
        with gemm.using_cpu_gemm(backend):
            assert gemm.explain_gemm(left, right, torch.bfloat16) == expected + more
    backends.reset_gemm_counts()
    gemm.scaled_gemm(left, right, torch.bfloat16)
    assert backends.gemm_counts() == {("scaled_gemm", "emulation"): 1}
    with pytest.raises(ValueError, match="strict asks for a GEMM on the quantized numbers themselves"):
        gemm.scaled_gemm(left, right, torch.bfloat16, strict=True)
    fallback = choose_gemm(left, right, torch.bfloat16, H100)
    with pytest.warns(RuntimeWarning, match=r"not native: nvfp4 blocks need compute capability 10\.0"):
        backends.record_choice(fallback, strict=False)
    backends.record_choice(fallback, strict=False)  # counted, not told again: a second warning would fail this test
    assert backends.gemm_counts() == {("scaled_gemm", "emulation"): 3}
    backends.reset_gemm_counts()
    assert backends.gemm_counts() == {}


def test_operands_that_do_not_fit_are_errors() -> None:
    left, right = pair("pow2 1x128 by 128x128", (4, 6, 200))
    stacked = left._replace(data=left.data[None], scale_inv=left.scale_inv[None])
    cases = {
        "left contracts 200 values and right 6": (left, right.mT),
        "right.scale_inv is (1, 1), but its blocks are (1, 2)": (left, right._replace(scale_inv=torch.ones(1, 1))),
        "left.kind is 'fp8'": (left._replace(kind="fp8"), right),
        "left.scale_inv is torch.float32; e8m0 has torch.uint8": (left._replace(kind="e8m0"), right),
        "right.data is torch.bfloat16": (left, right._replace(data=torch.ones(6, 200, dtype=torch.bfloat16))),
        "only a per-tensor operand has none": (left._replace(block=None), right),
        "left.amax is given, but its kind is pow2": (left._replace(amax=torch.ones(())), right),
        "a GEMM takes two matrices, got 3 and 2": (stacked, right),
    }
    for message, operands in cases.items():
        refused(functools.partial(gemm.scaled_gemm, *operands, torch.bfloat16), message)


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_accumulation(grad: torch.dtype) -> None:
    left, right = pair("pow2 1x128 by 1x128", (9, 12, 140))
    before = normal(9, 12, seed=5, dtype=grad)
    main_grad = before.clone()
    gemm.scaled_gemm_accumulate_(main_grad, left, right)
    a, b = torch.cat((exact(left), torch.eye(9).double()), 1), torch.cat((exact(right), before.double().mT), 1)
    assert_within(main_grad, a, b)
    gemm.scaled_gemm_accumulate_(main_grad.fill_(float("nan")), left, right, accumulate=False)
    assert_within(main_grad, exact(left), exact(right))
    refused(lambda: gemm.scaled_gemm_accumulate_(main_grad.mT, left, right), "main_grad is (12, 9)")


@pytest.mark.parametrize("sides", ALL)
def test_the_operation_is_the_function(sides: str) -> None:
    left, right = pair(sides, (6, 5, 64))
    expected = gemm.scaled_gemm(left, right, torch.bfloat16)
    assert torch.equal(_scaled_gemm(*flatten(left), *flatten(right), torch.bfloat16, None, True, False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["mxfp8", "per_tensor", "pow2 1x128 by 128x128"])
def test_compiled_whole_with_the_quantization(sides: str) -> None:
    """On CPU the compiler sees quantization, emulation and GEMM in one graph, for any number of rows."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gemm.scaled_gemm(quantized(x, *SIDES[sides][0]), quantized(weight, *SIDES[sides][1]), torch.bfloat16)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = normal(24, 256, seed=7)
    for rows in (3, 8):
        x = normal(rows, 256, seed=rows)
        assert torch.equal(compiled(x, weight), run(x, weight))


def test_padded_scales_of_square_blocks() -> None:
    """128x128 scales: K blocks contiguous, a multiple of 4 of them, zeros beyond."""
    for blocks in (1, 2, 3, 5):
        scales = torch.rand(3, blocks)
        padded = gemm.native._padded_inner(scales)
        length = -(-blocks // 4) * 4
        assert padded.shape == (length, 3) and padded.stride() == (1, length)
        assert torch.equal(padded[:blocks].t(), scales) and not padded[blocks:].any()


@pytest.mark.parametrize("shape", [(8, 1), (1, 3), (12, 5)], ids=str)
def test_scales_of_row_blocks_have_contiguous_rows(shape: tuple[int, int]) -> None:
    scales = torch.rand(shape)
    assert torch.equal(gemm.native._contiguous_outer(scales), scales)
    assert gemm.native._contiguous_outer(scales).stride() == (1, shape[0])


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 9)], ids=str)
def test_tiled_scales(shape: tuple[int, int]) -> None:
    """Tile (r // 128, c // 4), in it byte 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4; padding is zero."""
    rows, columns = shape
    scales = torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiled = gemm.native.tiled_32_4_4(scales)
    tiles = -(-columns // 4)
    assert tiled.numel() == -(-rows // 128) * tiles * 512
    expected = torch.zeros_like(tiled)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * tiles + c // 4
            expected[tile * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c]
    assert torch.equal(tiled, expected)


def test_microscaling_and_square_scales_reach_the_library_as_it_wants_them() -> None:
    _, right = pair("mxfp8 1x32 by 32x32", (64, 48, 128))
    (scales,), _, _ = gemm.native._scales(right)
    assert scales.dtype == torch.float8_e8m0fnu
    tiled = gemm.native.tiled_32_4_4(right.scale_inv.repeat_interleave(32, 0)[:48])
    assert torch.equal(scales.view(torch.uint8), tiled)
    packed = quantized(normal(64, 128, seed=1), "nvfp4", None)
    (blocks, whole), recipes, _ = gemm.native._scales(packed)
    assert (blocks.dtype, whole.shape, len(recipes)) == (torch.float8_e4m3fn, (1,), 2)
    assert torch.equal(whole[0], q.global_decode(packed.amax))


@pytest.mark.parametrize(("inner", "begin", "copied"), [(64, 0, False), (104, 0, True), (128, 8, True)])
def test_parts_of_a_wider_matrix_reach_the_library_aligned(
    inner: int, begin: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes rows that begin at multiples of 16 bytes; others are copied."""
    taken: list[torch.Tensor] = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        taken.extend((a, b.t()))
        return torch.zeros(())

    monkeypatch.setattr(gemm.native.F, "scaled_mm", scaled_mm)
    parts = [side._replace(data=side.data[:, begin : begin + 64]) for side in pair("per_tensor", (5, 32, inner))]
    gemm.native.scaled_gemm(*parts, torch.bfloat16, None, True)
    for found, part in zip(taken, parts, strict=True):
        assert torch.equal(found.view(torch.uint8), part.data.view(torch.uint8))
        assert found.stride(1) == 1 and found.stride(0) % 16 == 0 and found.data_ptr() % 16 == 0
        assert (found.data_ptr() != part.data.data_ptr()) == copied
