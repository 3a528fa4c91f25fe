"""Activation kernels against float64 and, where they round alike, against the reference; gradients against float64."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.activation import op, reference
from tests.kernels.triton.op_inputs import ACTIVATION_OPTIONS as OPTIONS
from tests.kernels.triton.op_inputs import activation_inputs as inputs

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
F32 = UNIT[torch.float32]

# T, F
SHAPES = [(1, 1), (3, 15), (2, 17), (5, 127), (1, 128), (3, 129), (2, 1000), (1, 4099), (0, 8), (3, 0)]


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_options(device, dtype, weighted, option) -> None:
    check(device, (37, 129), dtype, weighted, option)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", [OPTIONS[0], OPTIONS[1]])
def test_sizes(device, shape, option) -> None:
    check(device, shape, torch.bfloat16, True, option)
    check(device, shape, torch.float16, False, option)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 14336), (32768, 768), (1, 14336), (100_003, 1000)])
@pytest.mark.parametrize("option", [OPTIONS[1], OPTIONS[2], OPTIONS[-1]])
def test_real_sizes(device, shape, option) -> None:
    check(device, shape, torch.bfloat16, True, option)


def check(device, shape, dtype, weighted, option) -> None:
    name, gated, clamp, alpha, offset = option
    x, dy, probabilities = inputs(*shape, gated, weighted, dtype, device)
    y = op.activation_fwd(x, probabilities, *option)
    expected = defined(x, probabilities, option)
    assert y.shape == expected.shape and y.dtype == expected.dtype

    leaf = x.double().requires_grad_()
    if clamp is not None:
        clamp = torch.tensor(clamp, dtype=dtype).item()  # as PyTorch applies a scalar
    exact = defined(leaf, None, (name, gated, clamp, alpha, offset))
    p = torch.ones(shape[0], 1, device=device).double() if probabilities is None else probabilities.double()[:, None]
    # Sizes that errors are relative to: the gate (or plain input), what it is multiplied with, the result.
    gate, up = x.double().abs().chunk(2, -1) if gated else (x.double().abs(), torch.ones((), device=device))
    if clamp is not None:
        gate, up = gate.clamp(max=4 * clamp), up.clamp(max=clamp) + offset
    unit, floor = UNIT[dtype], torch.finfo(dtype).tiny * UNIT[dtype]  # half the distance of subnormals
    # The activation itself: exp or erf, with cancellation in the tails; then every rounding of the reference.
    value = {"squared_relu": torch.maximum(gate, gate.square()), "sigmoid": gate.clamp(min=1)}.get(name, gate)
    own = 16 * F32 * (1 + gate) * value * up
    roundings = 1 if not gated else 2 if clamp is None else 8 + 2 * alpha * gate
    y_error = own + (roundings + (probabilities is not None)) * unit * exact.detach().abs() + floor
    assert ((y.double() - exact.detach() * p).abs() <= y_error * p + floor).all()
    # Rounded in the same places, results differ only where the last bits decide: of exp, or of the reference's
    # cancelling 1 + tanh. Another order of roundings would move a fifth of the results.
    assert not y.numel() or dtype == torch.float32 or (y != expected).float().mean() <= 0.03

    dx, d_probabilities = op.activation_bwd(dy, x, probabilities, *option, weighted)
    (right,) = torch.autograd.grad(exact, leaf, dy.double() * p) if y.numel() else (torch.zeros_like(leaf),)
    slope = 16 * F32 * (1 + gate) * (1 + gate) * up * (dy.double() * p).abs()
    if gated:
        slope = torch.cat([slope, 16 * F32 * (1 + gate) * (1 + gate) ** 2 * (dy.double() * p).abs()], dim=-1)
    assert dx.shape == x.shape and dx.dtype == x.dtype
    assert ((dx.double() - right).abs() <= unit * right.abs() + slope + floor).all()
    if weighted:
        products = dy.double() * exact.detach()
        bound = (dy.double().abs() * y_error).sum(1) + (4 + shape[1]) * F32 * products.abs().sum(1)
        assert ((d_probabilities.double() - products.sum(1)).abs() <= bound).all()
    else:
        assert d_probabilities.numel() == 0


def defined(x: Tensor, probabilities: Tensor | None, option) -> Tensor:
    name, gated, clamp, alpha, offset = option
    if not gated:
        return reference.activation(x, name, probabilities=probabilities)
    options = {"clamp": clamp, "alpha": alpha, "up_offset": offset, "probabilities": probabilities}
    return reference.gated_activation(x, name, **options)


@pytest.mark.parametrize("option", OPTIONS)
def test_not_a_number_stays_and_large_values_make_none(device, option) -> None:
    x = torch.tensor([[float("nan"), 1e9, -1e9, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    got, expected = op.activation_fwd(x, None, *option), defined(x, None, option)
    assert torch.allclose(got, expected, equal_nan=True, rtol=1e-6)


def test_leading_dimensions_strides_and_autograd(device) -> None:
    x = torch.randn(6, 5, 4, device=device).transpose(0, 2).requires_grad_()  # [4, 5, 6]
    probabilities = torch.rand(5, 4, device=device).t().requires_grad_()
    got = op.activation_fwd(x, probabilities, *OPTIONS[1])
    expected = reference.gated_activation(x, "silu", probabilities=probabilities)
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, (x, probabilities), dy) for y in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
