"""Quantization as an operation of a CPU graph: the definitions' bits, and where it is called."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.backend import BackendError, using_backend
from te_models.kernels.custom_op import like, operation
from te_models.kernels.quantize import hadamard
from te_models.kernels.quantize.cpu import rounding as library
from te_models.kernels.quantize.fp8 import blocks, rounding
from te_models.kernels.quantize.nvfp4 import cpu as nvfp4_eager
from te_models.kernels.quantize.nvfp4 import reference as nvfp4
from tests.kernels.described import Calls
from tests.kernels.triton.quantize.quantize_cases import E4M3, E5M2, hard, ordinary, signed_zeros
from tests.patches import without_compiler

F32, BF16 = torch.float32, torch.bfloat16
VMAP_HAS_BITS = torch.__version__ >= "2.13"
SHAPES = [(64, 256), (70, 75), (3, 33, 140), (1, 1), (0, 16)]
"""Whole blocks, ragged ones, a batch, one element, none."""
DTYPES = [(BF16, BF16), *(pytest.param(d, marks=pytest.mark.slow) for d in ((F32, F32), (BF16, F32)))]
"""Of the numbers, and of their rounded values. Each pair is a library of its own to compile."""


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Ordinary numbers, all exponents with NaN and infinities among them, the same in range, zeros of either sign."""
    wild = hard(shape, dtype, sum(shape))
    return [
        ordinary(shape, dtype),
        wild,
        wild.clamp(-1e3, 1e3),
        torch.zeros(shape, dtype=dtype),
        signed_zeros(shape, dtype),
    ]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit, but for the payload of a NaN."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    nan, integer = wanted.isnan(), torch.int16 if wanted.dtype == BF16 else torch.int32
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.view(integer)[~nan], wanted.view(integer)[~nan])


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
def test_fp8_blocks(fp8_dtype: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    cases = [((1, 32), "e8m0", 0.0), ((32, 1), "e8m0", 0.0), ((32, 32), "e8m0", 0.0), ((1, 128), "pow2", 0.0)]
    cases += [((128, 1), "pow2", 1e-4), ((128, 128), "float32", 0.0), ((1, 128), "float32", 0.1)]
    for shape in SHAPES:
        for x in inputs(shape, dtypes[0]):
            for block, kind, epsilon in cases:
                found = library.round_fp8(x, block, fp8_dtype, kind, dtypes[1], epsilon)
                assert_same(found, rounding.round_blockwise(x, block, fp8_dtype, kind, dtypes[1], epsilon=epsilon))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
def test_one_fp8_scale_for_a_matrix(fp8_dtype: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for shape in SHAPES:
        for x in inputs(shape, dtypes[0]):
            for pow2, epsilon in ((False, 0.0), (True, 0.0), (False, 0.1)):
                found = library.round_current(x, fp8_dtype, pow2, epsilon, dtypes[1])
                wanted = rounding.round_current(x, fp8_dtype, dtypes[1], pow2=pow2, epsilon=epsilon)
                for a, b in zip(found, wanted, strict=True):
                    assert_same(a, b)
            for scale in (torch.tensor(0.37), torch.tensor([[3.0]]), torch.rand(*shape[:-1], 1) + 0.1):
                wanted = rounding.round_per_tensor(x, scale, fp8_dtype, dtypes[1])
                assert_same(library.round_scaled(x, scale, fp8_dtype, dtypes[1]), wanted)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_nvfp4(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    key = torch.tensor([-(2**40) - 3, 2**33 + 5])
    for shape in SHAPES:
        for x in inputs(shape, dtypes[0]):
            amax = library.amax(x)
            assert_same(amax, blocks.amax(x))
            for block, drawn in (((1, 16), None), ((16, 16), None), ((16, 1), None), ((1, 16), key), ((16, 1), key)):
                wanted, _ = nvfp4.round_nvfp4(x, dtypes[1], block=block, key=drawn, stream=1)
                assert_same(library.round_nvfp4(x, block, amax, dtypes[1], drawn, 1), wanted)


def test_nvfp4_with_an_amax_for_each_row_of_blocks() -> None:
    for shape, block in (((64, 48), (16, 1)), ((64, 48), (1, 16)), ((2, 32, 48), (16, 16))):
        x = ordinary(shape, BF16)
        amax = torch.rand(*shape[:-2], shape[-2] // block[0], 1) + 3
        amax[..., 1:2, :] *= -1  # of no matrix; the definition's signs all the same
        wanted, _ = nvfp4.round_nvfp4(x, BF16, block=block, amax=amax)
        assert_same(library.round_nvfp4(x, block, amax, BF16), wanted)


def test_what_decoding_nvfp4_multiplies_with() -> None:
    amax = torch.tensor([0.0, -0.0, 1.0, 3.3, 2688.0, 1e-44, 3e38, float("inf"), float("nan")])
    assert_same(library.global_decode(amax), nvfp4.global_decode(amax))
    assert library.global_decode(torch.tensor(5.0)).shape == ()


def test_the_transform() -> None:
    for shape in SHAPES:
        for x in (ordinary(shape, BF16), signed_zeros(shape, BF16), -torch.zeros(shape, dtype=BF16)):
            assert_same(library.random_hadamard(x), hadamard.random_hadamard(x, -2))
            assert_same(library.random_hadamard(x.mT), hadamard.random_hadamard(x.mT, -2))


KEY, SCALE = torch.tensor([3, 5]), torch.tensor(2.5)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "fp8": (lambda x: q.round_blockwise(x, (1, 32), E4M3, "e8m0", BF16), ["round_blockwise"]),
    "nvfp4": (lambda x: q.round_nvfp4(x, BF16, block=(16, 1), key=KEY)[0], ["matrix_amax", "round_nvfp4"]),
    "nvfp4, own amax": (lambda x: q.round_current_nvfp4(x, BF16, key=KEY)[0], ["round_current_nvfp4"]),
    "current": (lambda x: q.round_current(x, E4M3, BF16, pow2=True)[0], ["round_current"]),
    "delayed": (lambda x: q.round_per_tensor(x, SCALE, E5M2, BF16), ["round_per_tensor"]),
    "amax": (lambda x: q.raised_amax(x, SCALE), ["raised_amax"]),
    "transform": (lambda x: q.random_hadamard(x, -2), ["random_hadamard_rows"]),
}


EAGER: dict[str, tuple[str, ModuleType, Callable[[Any, Tensor], Any]]] = {
    "fp8": ("round_fp8", rounding, lambda its, x: its.round_blockwise(x, (1, 32), E4M3, "e8m0", BF16)),
    "fp8, as quantizers call it": (
        *("round_fp8", rounding),
        lambda its, x: its.round_blockwise(x, (32, 1), E4M3, "pow2", F32, epsilon=0.1),
    ),
    "nvfp4": ("round_nvfp4", nvfp4, lambda its, x: its.round_nvfp4(x, BF16, block=(1, 16), key=KEY, stream=1)),
    "nvfp4, own amax": ("round_nvfp4", nvfp4_eager, lambda its, x: its.round_current_nvfp4(x, BF16, block=(1, 16))),
    "current": ("round_current", rounding, lambda its, x: its.round_current(x, E5M2, F32, pow2=True)),
    "delayed": ("round_scaled", rounding, lambda its, x: its.round_per_tensor(x, SCALE, E4M3, BF16)),
    "transform": ("random_hadamard", hadamard, lambda its, x: its.random_hadamard(x, -2)),
}
"""Function of the library -> the module of the definition, and what is called of it, and of `q` by eager code."""


@pytest.mark.parametrize("name", EAGER)
def test_eager_code_takes_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the definition's bits; not where a gradient or a transform of functions wants the arithmetic."""
    function_name, module, call = EAGER[name]
    function, definition = functools.partial(call, q), functools.partial(call, module)
    calls: list[str] = []
    its = getattr(library, function_name)
    monkeypatch.setattr(library, function_name, lambda *args: (calls.append(function_name), its(*args))[1])
    with using_backend("definition"):
        function(ordinary((64, 96), BF16))
    assert not calls
    for x in (*inputs((64, 96), BF16), ordinary((96, 64), BF16).mT, ordinary((2, 32, 64), BF16)):
        for found, wanted in zip(_tensors(function(x)), _tensors(definition(x)), strict=True):
            assert_same(found, wanted)
    seen = len(calls)
    assert seen == 7
    function(ordinary((64, 96), BF16).requires_grad_())
    # these have no form for it, and before torch 2.13 the bits of a number have none
    if "nvfp4" not in name and name != "transform" and VMAP_HAS_BITS:
        torch.func.vmap(function)(ordinary((2, 64, 96), BF16))
    assert len(calls) == seen


def _tensors(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_has_operations_with_the_bits_of_eager_code(name: str) -> None:
    function, operations = FUNCTIONS[name]
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        called.extend(target._opname for target in targets if target.namespace == "te_models")
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for shape in ((33, 48), (64, 80)):
        x = ordinary(shape, BF16)
        with Calls() as calls:
            wanted = function(x)
        assert not calls.found, "eager code runs the definition"
        assert_same(compiled(x), wanted)
    assert called == operations, "one graph for both sizes"


def test_where_a_gradient_is_wanted_the_arithmetic_is_traced() -> None:
    def function(x: Tensor) -> Tensor:
        return q.round_blockwise(x, (1, 32), E4M3, "pow2", F32).square().sum()

    gradients = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        x = ordinary((4, 64), F32).requires_grad_()
        (gradient,) = torch.autograd.grad(run(x), x)
        gradients.append(gradient)
    assert gradients[0].any() and torch.equal(*gradients)


def test_an_exported_program_has_no_such_operation() -> None:
    class Rounding(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return q.round_blockwise(x, (1, 32), E4M3, "e8m0", BF16)

    x = ordinary((4, 64), BF16)
    program = torch.export.export(Rounding(), (x,))
    assert not [node for node in program.graph.nodes if "te_models" in str(node.target)]
    assert_same(program.module()(x), Rounding()(x))


def test_without_a_compiler_the_definitions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x, key = ordinary((64, 256), BF16), torch.tensor([3, 5])

    def quantized(x: Tensor) -> list[Tensor]:
        values, amax = q.round_nvfp4(x, BF16, block=(16, 1), key=key)
        found = [q.round_blockwise(x, (1, 32), E4M3, "e8m0", BF16), q.random_hadamard(x, -2), values, amax]
        found += [*q.round_current(x, E4M3, BF16), *q.round_current_nvfp4(x, BF16, key=key)]
        return [*found, q.round_per_tensor(x, SCALE, E4M3, BF16), q.raised_amax(x, SCALE)]

    monkeypatch.setattr(library, "_function", lambda *arguments: pytest.fail("compiled"))
    torch._dynamo.reset()
    with using_backend("definition"):
        for found, wanted in zip(torch.compile(quantized, backend="aot_eager")(x), quantized(x), strict=True):
            assert_same(found, wanted)


def test_a_missing_compiler_is_noticed_and_counted(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    monkeypatch.setattr(library, "_function", without_compiler)
    x = ordinary((4, 64), BF16)
    assert_same(torch.ops.te_models.round_per_tensor(x, SCALE, E4M3, F32), rounding.round_per_tensor(x, SCALE, E4M3))
    assert library.fallbacks == {"there is no C++ compiler": 1}
    assert_same(q.round_per_tensor(x, SCALE, E4M3, BF16), rounding.round_per_tensor(x, SCALE, E4M3, BF16))
    assert library.fallbacks == {"there is no C++ compiler": 2}
    with using_backend("compiled"), pytest.raises(BackendError, match="round_per_tensor has no library here: there is"):
        q.round_per_tensor(x, SCALE, E4M3, BF16)


def test_a_torch_whose_operations_have_no_library_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementation is then registered by what torch documents, with the same results."""
    importlib.import_module("torch._dynamo")  # which defines an operation of its own when it is first needed
    define = torch.library.custom_op

    class Public:
        """An operation without the private attribute."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.made = define(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            if name == "_lib":
                raise AttributeError(name)
            return getattr(self.made, name)

    monkeypatch.setattr(torch.library, "custom_op", Public)

    @operation("test_without_library", lambda x: like(x), cpu_only=True)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    assert torch.equal(torch.ops.te_models.test_without_library(torch.ones(3)), torch.full((3,), 2.0))
