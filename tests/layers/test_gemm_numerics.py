"""The three GEMMs of Linear under every recipe, against float64 products of independently quantized operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_models.layers import Linear, NVFP4BlockScaling, Recipe, autocast
from tests.layers import emulation as em
from tests.layers import emulation_nvfp4 as em4
from tests.layers.emulation_gemm import KEY, RECIPES, SCALES, UNIT, assert_within

SIZES = [(1, 16, 16), (17, 130, 33), (129, 64, 96), (33, 1000, 31)]
"""rows, in, out: odd ones included; padding to blocks is the layer's business."""


def numbers(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, w and dy whose sums of 16 float32 holds exactly, so that the order within the transform does not matter."""
    generator = torch.Generator().manual_seed(rows * k + n)
    found = []
    for shape, step in (((rows, k), 2.0**-12), ((n, k), 2.0**-16), ((rows, n), 2.0**-20)):
        values = torch.randn(shape, generator=generator) * (step * 1000)
        found.append(((values / step).round() * step).to(dtype))
    return tuple(found)


def gradients(
    recipe: Recipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx and dw of one Linear."""
    layer = Linear(*reversed(w.shape), bias=False, params_dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    layer.fp8_scale = torch.tensor(list(SCALES.values()))[:, None]
    layer.fp8_rng_state = torch.tensor(KEY)
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x)
        y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_fprop_dgrad_and_wgrad(name: str, dtype: torch.dtype) -> None:
    recipe, operands = RECIPES[name]
    overflow = em.BF16_MAX if dtype == torch.bfloat16 else em.F32_MAX
    for size in SIZES:
        tensors = dict(zip(("x", "w", "dy"), numbers(*size, dtype), strict=True))
        op = {
            (role, usage): operands(role, usage, t.float().numpy(), overflow)
            for role, t in tensors.items()
            for usage in ("rowwise", "columnwise")
        }
        y, dx, dw = gradients(recipe, **tensors)
        assert y.dtype == dx.dtype == dw.dtype == dtype
        assert_within(y, op["x", "rowwise"], op["w", "rowwise"].T)
        assert_within(dx, op["dy", "rowwise"], op["w", "columnwise"])
        assert_within(dw, op["dy", "columnwise"].T, op["x", "columnwise"])


WITHOUT = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
WITH = NVFP4BlockScaling(disable_stochastic_rounding=True)


def test_the_transform_cancels_exactly_where_it_is_quantized_exactly() -> None:
    """One value in a column becomes 16 of one magnitude, which NVFP4 holds exactly; so dw is the true product."""
    rows, k, n = 40, 24, 20
    x, dy = torch.zeros(rows, k), torch.zeros(rows, n)
    x[torch.arange(k) % rows, torch.arange(k)] = 0.75
    dy[torch.arange(n) * 3 % rows, torch.arange(n)] = -3.0
    _, _, dw = gradients(WITH, x, torch.ones(n, k), dy)
    expected = dy.T @ x
    assert torch.count_nonzero(expected) > 5
    torch.testing.assert_close(dw, expected, rtol=1e-5, atol=1e-6)


def lengths(columns: np.ndarray, rotated: bool) -> tuple[np.ndarray, np.ndarray]:
    """The length of every column, [C, T], and that of the error of quantizing it, transformed or not."""
    exact, quantized = columns.astype(np.float64), em4.quantize(columns).values
    if rotated:
        padded = np.pad(exact, ((0, 0), (0, -columns.shape[1] % 16)))
        exact = (padded.reshape(len(columns), -1, 16) @ em4.hadamard()).reshape(padded.shape)
        quantized = em4.quantize(em4.rotate(columns)).values
    return np.linalg.norm(columns, axis=1), np.linalg.norm(quantized - exact, axis=1)


@pytest.mark.parametrize("outlier", [1.0, 200.0])
def test_with_and_without_the_transform_the_weight_gradient_is_the_same_but_for_quantization(outlier: float) -> None:
    """By the Cauchy-Schwarz inequality |q(a) . q(b) - a . b| <= |ea| |b| + |a| |eb| + |ea| |eb|, and the transform is
    orthogonal, so it keeps a . b and the lengths: the two differ by no more than the sum of their bounds."""
    x, w, dy = numbers(64, 48, 33, torch.bfloat16)
    x[3] *= outlier
    (_, _, plain), (_, _, rotated) = gradients(WITHOUT, x, w, dy), gradients(WITH, x, w, dy)
    exact, bound = dy.double().numpy().T @ x.double().numpy(), np.zeros(w.shape)
    for turned in (False, True):
        (a, ea), (b, eb) = (lengths(t.float().numpy().T, turned) for t in (dy, x))
        bound += np.outer(ea, b) + np.outer(a, eb) + np.outer(ea, eb)
    bound += 2 * 2.01 * UNIT[torch.bfloat16] * (np.abs(exact) + bound)
    difference = np.abs(rotated.double().numpy() - plain.double().numpy())
    assert (difference <= bound).all()
    # an average error is far below the bound, which no sign cancels in; a transform of one operand only exceeds this
    error = rotated.double().numpy() - exact
    assert np.linalg.norm(error) < 0.3 * np.linalg.norm(exact)
    assert difference.max() > 0
