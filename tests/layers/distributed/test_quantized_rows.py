"""Rows as the bytes that travel between ranks: what the receiver's quantizer leaves as it is."""

import pytest
import torch
from torch import Tensor

from te_models.layers import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, recipe
from te_models.layers.distributed.quantized_rows import pack_rows, row_formats, unpack_rows
from te_models.layers.quantizer import Quantizer
from tests.compare import raw

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QUANTIZERS = {
    "mxfp8": MXFP8Quantizer(),
    "mxfp8 e5m2": MXFP8Quantizer(fp8_dtype=E5M2),
    "block": Float8BlockQuantizer(block_scaling_dim=1),
    "block e5m2": Float8BlockQuantizer(block_scaling_dim=1, fp8_dtype=E5M2),
    "block epsilon": Float8BlockQuantizer(block_scaling_dim=1, amax_epsilon=0.5),
}


def rows(dtype: torch.dtype) -> Tensor:
    """Rows of many magnitudes, of zeros, with an infinity and with NaN, and a last block that is not whole."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 160, generator=generator) * torch.logspace(-6, 6, 64, base=2.0)[:, None]
    x *= torch.logspace(-12, 0, 160, base=2.0)[torch.randperm(160, generator=generator)]
    x[3] = 0
    x[4, 7], x[5, 9] = torch.inf, torch.nan
    # a largest value that is rounded down to a power of two, whose block gets half the scale the second time
    x[6, :32] = torch.linspace(0.1, 225, 32)
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of x, every NaN being the same: C++ and torch make different ones."""
    return raw(x.masked_fill(x.isnan(), torch.nan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_rows_arrive_as_the_receiver_would_round_them(name: str, dtype: torch.dtype) -> None:
    quantizer, x = QUANTIZERS[name], rows(dtype)
    assert quantizer.keeps_rows
    packed = pack_rows(x, quantizer)
    assert packed.dtype is torch.uint8 and packed.shape == (64, 160 + (5 if "mxfp8" in name else 2 * 4))
    arrived = unpack_rows(packed, quantizer, 160, dtype)
    rounded = quantizer.quantize(x).dequantize(dtype)
    assert arrived.dtype is dtype and torch.equal(bits(arrived), bits(rounded))
    assert torch.equal(bits(quantizer.quantize(arrived).dequantize(dtype)), bits(rounded)), "a second time"
    some = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:17]
    assert torch.equal(bits(unpack_rows(packed[some], quantizer, 160, dtype)), bits(rounded[some]))
    assert unpack_rows(pack_rows(x[:0], quantizer), quantizer, 160, dtype).shape == (0, 160)


@pytest.mark.parametrize(
    "quantizer",
    [
        NVFP4Quantizer(),
        MXFP8Quantizer(two_dimensional=True),
        Float8BlockQuantizer(),
        Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False),
    ],
    ids=str,
)
def test_other_formats_do_not_travel(quantizer: Quantizer) -> None:
    assert not quantizer.keeps_rows
    with pytest.raises(ValueError, match=r"rows do not keep their values|of single rows"):
        pack_rows(torch.ones(4, 64), quantizer)


def test_the_formats_are_those_of_the_recipe() -> None:
    quantizers = recipe("mxfp8").quantizers("", "")
    assert row_formats(quantizers, quantizers) == (quantizers.input, quantizers.grad_output)
    assert row_formats(None, None) == (None, None)
    original = recipe("mxfp8", backward_override="high_precision").quantizers("", "")
    assert row_formats(original, original) == (original.input, None), "such gradients are not quantized"
    for name, of in {"delayed": "float8", "current": "float8", "nvfp4": "nvfp4"}.items():
        quantizers = recipe(name).quantizers("", "")
        with pytest.raises(ValueError, match=f"as the input of the experts, {of}.*; allowed with .*MXFP8"):
            row_formats(quantizers, quantizers)
