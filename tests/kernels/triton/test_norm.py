"""Norm kernels against float64, by the bound that the reference keeps too; gradients; sizes with ragged edges."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.custom_op import flatten
from te_models.kernels.norm import op, reference
from te_models.kernels.norm.quantized import norm_quantized
from te_models.kernels.quantize.output import QuantizedOutput
from tests.kernels.triton.op_inputs import NORM_OPTIONS as OPTIONS
from tests.kernels.triton.op_inputs import norm_inputs as inputs

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPS = 1e-5

# T, H
SHAPES = [(1, 1), (3, 15), (17, 17), (5, 127), (2, 128), (33, 129), (4, 1000), (0, 64)]
MIXED = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


class Exact:
    """The norm in float64, and how far a float32 evaluation of it may be off."""

    def __init__(self, x, weight, bias, centered, zero_centered) -> None:
        self.x = x.double()
        self.gamma = torch.ones(()).double() if weight is None else weight.double() + zero_centered
        self.beta = 0.0 if bias is None else bias.double()
        mean = self.x.mean(-1, keepdim=True) if centered else torch.zeros_like(self.x[:, :1])
        self.rstd = ((self.x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        self.x_hat = (self.x - mean) * self.rstd
        self.centered = centered
        self.y = self.gamma * self.x_hat + self.beta
        # x_hat: sums of H terms for mean and deviation, the subtraction and the product.
        self.u = (8 + x.shape[-1] ** 0.5) * UNIT[torch.float32]
        offset = self.x.abs().mean(-1, keepdim=True) * self.rstd if centered else 0.0
        self.x_hat_error = self.u * (self.x_hat.abs() + offset)

    def y_bound(self, unit: float, roundings: int) -> Tensor:
        size = self.gamma.abs() * self.x_hat.abs() + (self.beta if isinstance(self.beta, float) else self.beta.abs())
        return self.gamma.abs() * self.x_hat_error + roundings * unit * size + 1e-30

    def gradients(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dy = dy.double()
        g = dy * self.gamma
        dx = g - self.x_hat * (g * self.x_hat).mean(-1, keepdim=True)
        if self.centered:
            dx = dx - g.mean(-1, keepdim=True)
        return dx * self.rstd, (dy * self.x_hat).sum(0), dy.sum(0)

    def gradient_bounds(self, dy: Tensor, unit: float, weight_unit: float) -> tuple[Tensor, Tensor, Tensor]:
        dy, tokens = dy.double().abs(), dy.shape[0]
        g, x_hat = dy * self.gamma.abs(), self.x_hat.abs() + self.x_hat_error
        size = g + x_hat * (g * x_hat).mean(-1, keepdim=True) + self.centered * g.mean(-1, keepdim=True)
        # gamma may be rounded; x_hat's own error enters twice.
        relative = unit + weight_unit + 4 * self.u
        from_x_hat = self.x_hat_error * (g * x_hat).mean(-1, keepdim=True)
        from_x_hat = from_x_hat + x_hat * (g * self.x_hat_error).mean(-1, keepdim=True)
        dx = self.rstd * (relative * size + from_x_hat)
        sums = weight_unit + (4 + tokens) * UNIT[torch.float32]
        d_weight = (dy * self.x_hat_error).sum(0) + (sums + unit) * (dy * x_hat).sum(0)
        return dx + 1e-30, d_weight + 1e-30, sums * dy.sum(0) + 1e-30


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
@pytest.mark.parametrize("shape", [(33, 129), (4, 1000)])
def test_options(device, shape, dtype, weight_dtype, option) -> None:
    check(device, shape, dtype, weight_dtype, option)


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", [OPTIONS[0], OPTIONS[5]])
def test_sizes(device, shape, option) -> None:
    check(device, shape, torch.bfloat16, torch.bfloat16, option)
    check(device, shape, torch.float16, torch.float16, option)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32768, 4096), (4096, 16384), (100_003, 128), (777, 5120), (64, 65536)])
@pytest.mark.parametrize("option", [OPTIONS[0], OPTIONS[5]])
def test_real_sizes(device, shape, option) -> None:
    check(device, shape, torch.bfloat16, torch.bfloat16, option)


def check(device, shape, dtype, weight_dtype, option) -> None:
    centered, zero_centered, weight_last, has_weight, has_bias = option
    x, weight, bias = inputs(*shape, dtype, weight_dtype, has_weight, has_bias, device)
    exact = Exact(x, weight, bias, centered, zero_centered)
    y, mean, rstd = op.norm_fwd(x, weight, bias, EPS, *option[:3])
    expected = defined(x, weight, bias, option)
    assert y.dtype == expected.dtype
    # Each of gamma, x_hat, the product and the sum is rounded at most once.
    bound = exact.y_bound(max(UNIT[dtype], UNIT[y.dtype]), 4 if weight_last else 1)
    assert ((expected.double() - exact.y).abs() <= bound).all()
    assert ((y.double() - exact.y).abs() <= bound).all()
    # Rounded in the same places, results differ only where the last bit of a sum decides.
    assert y.numel() == 0 or y.dtype == torch.float32 or (y != expected).float().mean() <= 0.01
    assert ((rstd.double() - exact.rstd[:, 0]).abs() <= exact.u * exact.rstd[:, 0]).all()
    assert mean.numel() == (shape[0] if centered else 0)

    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(y.dtype).to(device)
    wanted = [None if p is None else p.dtype for p in (weight, bias)]
    got = op.norm_bwd(dy, x, weight, mean, rstd, *option[:3], *wanted)
    bounds = exact.gradient_bounds(dy, UNIT[dtype], UNIT[weight_dtype])
    for gradient, right, allowed, like in zip(got, exact.gradients(dy), bounds, (x, weight, bias), strict=True):
        if like is None:
            assert gradient.numel() == 0
        else:
            assert gradient.dtype == like.dtype and ((gradient.double() - right).abs() <= allowed).all()


def defined(x: Tensor, weight: Tensor | None, bias: Tensor | None, option) -> Tensor:
    """The reference by the same options."""
    centered, zero_centered, weight_last, _, _ = option
    options = {"zero_centered": zero_centered, "cast_order": "weight_last" if weight_last else "weight_first"}
    if centered:
        return reference.layer_norm(x, weight, bias, EPS, **options)
    return reference.rms_norm(x, weight, EPS, **options)


@pytest.mark.usefixtures("poisoned")
def test_many_programs_share_the_rows(device) -> None:
    """More rows than the first stage has programs, in stretches that end inside a tile."""
    check(device, (301, 24), torch.float32, torch.float32, OPTIONS[5])


@pytest.mark.sentinels("option1")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("option", [OPTIONS[0], OPTIONS[4], OPTIONS[5]])
def test_gradients_of_rows_too_long_to_hold(device, option) -> None:
    """Longer than a program's registers hold: sums over rows first, then stretches of rows and parts of the columns."""
    check(device, (7, 8200), torch.bfloat16, torch.bfloat16, option)


def test_two_runs_agree(device) -> None:
    x, weight, _ = inputs(77, 40, torch.bfloat16, torch.bfloat16, True, False, device)
    y, mean, rstd = op.norm_fwd(x, weight, None, EPS, False, False, True)
    runs = [op.norm_bwd(y, x, weight, mean, rstd, False, False, True, torch.float32, None) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradients_through_autograd(device) -> None:
    """Leading dimensions, a transposed input, and gradients only where asked for."""
    x = torch.randn(5, 3, 2, device=device).transpose(0, 2).requires_grad_()
    weight, bias = torch.randn(5, device=device, requires_grad=True), torch.randn(5, device=device)
    y, mean, rstd = op.norm_fwd(x, weight, bias, EPS, True, False, False)
    assert not mean.requires_grad and not rstd.requires_grad
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, weight), dy)
    expected = torch.autograd.grad(reference.layer_norm(x, weight, bias, EPS), (x, weight), dy)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [lambda p: p.repeat_interleave(2)[::2], lambda p: p[:1].expand(40)], ids=["", "one"])
def test_parameters_with_strides(device, spread) -> None:
    """Every other element of a larger tensor, one number for all columns."""
    x, *parameters = inputs(3, 40, torch.bfloat16, torch.bfloat16, True, True, device)
    weight, bias = (spread(p) for p in parameters)
    assert not weight.is_contiguous() and not bias.is_contiguous()
    whole = (weight.contiguous(), bias.contiguous())
    flags, dtypes, output = (True, False, False), (torch.float32, torch.float32), QuantizedOutput(block=32)
    results = []
    for w, b in ((weight, bias), whole):
        y, mean, rstd = op.norm_fwd(x, w, b, EPS, *flags)
        quantized = norm_quantized(x, w, b, EPS, *flags, None, *flatten(output))
        results.append([y, *op.norm_bwd(y, x, w, mean, rstd, *flags, *dtypes), *quantized])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.float(), other.float())


def test_a_row_too_long_is_refused(device) -> None:
    with pytest.raises(ValueError, match="65537 columns"):
        op.norm_fwd(torch.zeros(1, 65537, device=device), None, None, EPS, False, False, True)
