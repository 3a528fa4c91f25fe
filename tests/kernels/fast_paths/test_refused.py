"""Calls that a fast path once took and read beyond memory, or whose values are not in it: now as the definition."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.gemm import dense, few_rows, gemv
from te_models.kernels.gemm.operand import ScaledOperand
from te_models.kernels.quantize import quantize_per_tensor
from te_models.layers import Linear
from te_models.layers.attention.core import attend

BF16, F32 = torch.bfloat16, torch.float32


def drawn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def negative(*shape: int) -> Tensor:
    """Return a tensor whose memory holds its negative."""
    found = torch.view_as_complex(drawn(*shape, 2)).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("channels", [500, 600])
def test_a_linear_layer_refuses_rows_of_another_width(channels: int, gradients: bool) -> None:
    layer = Linear(512, 256, params_dtype=BF16)
    with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(drawn(1, channels, dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_product_of_few_rows_takes_a_bias_as_torch_does(dtype: torch.dtype) -> None:
    x, weight = drawn(2, 512, dtype=dtype), drawn(256, 512, dtype=dtype)
    with torch.no_grad():
        one = drawn(1, dtype=dtype)
        assert gemv.uses_gemv(x, weight) and not gemv.uses_gemv(x, weight, one)
        torch.testing.assert_close(dense.linear(x, weight, one), F.linear(x, weight, one))
        for bias in (drawn(3, dtype=dtype), drawn(256).double(), drawn(256, dtype=dtype).to("meta")):
            assert not gemv.uses_gemv(x, weight, bias)
            with pytest.raises(RuntimeError):
                dense.linear(x, weight, bias)
        assert not gemv.uses_gemv(x, weight.to("meta")), "whose address is zero"


def stored(rows: int, columns: int) -> ScaledOperand:
    data = quantize_per_tensor(drawn(rows, columns), torch.tensor(100.0), torch.float8_e4m3fn)
    return ScaledOperand(data, torch.tensor(0.01), "per_tensor")


def test_a_stored_weight_takes_what_its_dequantized_values_do() -> None:
    weight = stored(256, 512)
    values = few_rows.dequantized_weight(weight, F32)
    with torch.no_grad():
        for channels in (500, 600):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                few_rows.stored_weight_linear(drawn(1, channels), weight)
        x = drawn(2, 512)
        torch.testing.assert_close(few_rows.stored_weight_linear(x, weight, drawn(1)), F.linear(x, values, drawn(1)))
        found = few_rows.stored_weight_linear(negative(2, 512), weight)
        torch.testing.assert_close(found, F.linear(negative(2, 512), values))
        with pytest.raises(RuntimeError):
            few_rows.stored_weight_linear(x, weight, drawn(3))


SHAPES = [
    ((2, 8, 1, 64), (1, 8, 1024, 64), (1, 8, 1024, 64)),
    ((1, 8, 1, 64), (2, 8, 1024, 64), (2, 8, 1024, 64)),
    ((1, 8, 1, 64), (1, 8, 1024, 32), (1, 8, 1024, 64)),
    ((1, 8, 1, 64), (1, 3, 1024, 64), (1, 3, 1024, 64)),
    ((1, 8, 1, 64), (1, 8, 1024, 64), (1, 8, 1023, 64)),
]


@pytest.mark.parametrize(("q", "k", "v"), SHAPES, ids=str)
def test_one_token_broadcasts_and_refuses_as_torch(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    def ours() -> Tensor:
        flags = {"causal": False, "scale": 0.125, "softcap": None, "dropout": 0.0}
        return attend(drawn(*q), drawn(*k), drawn(*v), None, None, None, **flags)

    def theirs() -> Tensor:
        shared = q[1] != k[1]
        return F.scaled_dot_product_attention(drawn(*q), drawn(*k), drawn(*v), scale=0.125, enable_gqa=shared)

    with torch.no_grad():
        assert_alike(ours, theirs)


def assert_alike(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """Assert that both return the same numbers, or raise."""
    try:
        wanted = theirs()
    except (RuntimeError, ValueError):
        with pytest.raises((RuntimeError, ValueError)):
            ours()
    else:
        torch.testing.assert_close(ours(), wanted)
