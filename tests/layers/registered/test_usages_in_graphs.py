"""Usages that change in a compiled function: which copies `quantize` makes there, and what the object says after."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.layers as te
from tests.compare import raw

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
QUANTIZERS: dict[str, Callable[[], Any]] = {
    "current": te.Float8CurrentScalingQuantizer,
    "block": lambda: te.Float8BlockQuantizer(block_scaling_dim=1),
    "mxfp8": te.MXFP8Quantizer,
    "nvfp4": te.NVFP4Quantizer,
    "live": lambda: te.Float8Quantizer(torch.ones(()), None, torch.float8_e4m3fn),
}


def told(x: Tensor, quantizer: Any) -> Any:
    quantizer.set_usage(columnwise=False)
    return quantizer.quantize(x)


def other(x: Tensor, quantizer: Any) -> Any:
    return quantizer.with_usage(rowwise=False, columnwise=True).quantize(x)


def told_and_back(x: Tensor, quantizer: Any) -> Any:
    quantizer.set_usage(rowwise=False)
    first = quantizer.quantize(x)
    quantizer.set_usage(rowwise=True)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    return first, quantizer.quantize(x)


def tensors(found: Any) -> list[tuple[str, Tensor]]:
    return [pair for t in (found if isinstance(found, tuple) else (found,)) for pair in t.fields.items()]


@pytest.mark.sentinels("mxfp8-told", "mxfp8-other", "live-told_and_back")
@pytest.mark.parametrize("function", [told, other, told_and_back], ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_usages_change_in_a_compiled_function(name: str, function: Callable[..., Any]) -> None:
    if name == "live" and function is other:  # it is told, and has no other value
        function = told
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    kept = QUANTIZERS[name]()
    for quantizer in (QUANTIZERS[name](), kept, kept):  # told again what it was told before
        eager = QUANTIZERS[name]()
        found, expected = tensors(compiled(X, quantizer)), tensors(function(X, eager))
        assert [n for n, _ in found] == [n for n, _ in expected]
        for (_, a), (_, b) in zip(found, expected, strict=True):
            assert torch.equal(raw(a), raw(b))
        assert quantizer.get_usages() == eager.get_usages()
    if name != "live":
        assert kept == QUANTIZERS[name]()  # the value is what it was


@pytest.mark.slow
def test_a_quantizer_that_was_told_before_the_call() -> None:
    quantizer = te.MXFP8Quantizer()
    quantizer.set_usage(columnwise=False)
    compiled = torch.compile(lambda x, q: q.quantize(x), fullgraph=True, backend="aot_eager")
    assert list(compiled(X, quantizer).fields) == ["rowwise_data", "rowwise_scale_inv"]
    assert len(compiled(X, te.MXFP8Quantizer()).fields) == 4
    quantizer.set_usage(rowwise=False, columnwise=True)
    assert list(compiled(X, quantizer).fields) == ["columnwise_data", "columnwise_scale_inv"]
