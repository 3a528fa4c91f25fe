"""Compiled functions for eager code on CPU: what they store and decode has the bits of the definitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.quantize import eager
from te_models.kernels.quantize.cpu_graph import library, stored
from te_models.kernels.quantize.fp8 import reference as fp8
from te_models.kernels.quantize.nvfp4 import cpu as nvfp4
from tests.kernels.quantize.test_cpu_graph import assert_same, inputs

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float32]
BLOCKS = [((1, 32), "e8m0", 0.0), ((32, 1), "e8m0", 0.0), ((1, 128), "pow2", 1e-4), ((128, 128), "float32", 0.0)]


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    """Compiled functions for the time of a test."""
    before = dict(eager.compiled)
    assert stored.load_compiled()
    yield
    eager.compiled.clear()
    eager.compiled.update(before)


def all_inputs(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Inputs with and without NaN, the latter with infinities, and with numbers of all exponents."""
    wild = inputs(shape, dtype)
    return [*wild, wild[1].nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_blocks(dtype: torch.dtype) -> None:
    for shape in ((64, 256), (70, 75), (128, 128)):
        for x in all_inputs(shape, dtype):
            for block, kind, epsilon in BLOCKS:
                found = q.quantize_blockwise(x, block, E4M3, kind, epsilon=epsilon)
                wanted = fp8.quantize_blockwise(x, block, E4M3, kind, epsilon=epsilon)
                assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8)), (shape, block)
                assert torch.equal(found[1].view(torch.uint8), wanted[1].view(torch.uint8)), (shape, block)
                for out in DTYPES:
                    decoded = q.dequantize_blockwise(*wanted, block, out)
                    assert_same(decoded, fp8.dequantize_blockwise(*wanted, block, out))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4(dtype: torch.dtype) -> None:
    for x in all_inputs((64, 256), dtype):
        for rows in (1, 16):
            for amax in (None, q.amax(x) * 2):
                found = q.quantize_nvfp4(x, block_rows=rows, amax=amax)
                wanted = nvfp4.reference.quantize_nvfp4(x, block_rows=rows, amax=amax)
                nan = wanted[1].float().isnan().repeat_interleave(8, 1)  # their codes have no meaning
                assert torch.equal(found[0][~nan], wanted[0][~nan])
                assert torch.equal(found[1].view(torch.uint8), wanted[1].view(torch.uint8))
                assert_same(found[2], wanted[2])
                decoded = q.decode_blocks(wanted[0], wanted[1], 256)
                assert_same(decoded, nvfp4.reference.decode_blocks(wanted[0], wanted[1], 256))


def test_the_compiled_functions_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 128)
    for name in eager.compiled:
        monkeypatch.setitem(eager.compiled, name, lambda *_, name=name: name)
    assert q.quantize_blockwise(x, (1, 32), E4M3, "e8m0") == "quantize_blockwise"
    assert q.dequantize_blockwise(x.to(E4M3), torch.ones(16, 4), (1, 32), torch.float32) == "dequantize_blockwise"
    assert q.quantize_nvfp4(x) == "quantize_nvfp4"
    codes, scales = torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 8).to(E4M3)
    assert q.decode_blocks(codes, scales, 128) == "decode_blocks"


def test_without_a_compiler_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    eager.compiled.clear()
    monkeypatch.setattr(library, "available", lambda trial: False)
    assert not stored.load_compiled()
    assert eager.compiled == {}
