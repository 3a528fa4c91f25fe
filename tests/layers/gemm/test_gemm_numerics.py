"""The three GEMMs of Linear and GroupedLinear under every recipe, against float64 products of independently quantized
operands, with weights stored quantized or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from te_models.layers import GroupedLinear, Linear, NVFP4BlockScaling, Recipe, autocast
from tests.layers import emulation as em
from tests.layers import emulation_nvfp4 as em4
from tests.layers.emulation_gemm import (
    KEY,
    RECIPES,
    SCALES,
    UNIT,
    assert_within,
    stored_operands,
)

pytestmark = pytest.mark.usefixtures("each_backend")

SIZES = [(1, 16, 16), (17, 130, 33), (129, 64, 96), (33, 1000, 31), (129, 256, 128)]
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
    recipe: Recipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, stored: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx and dw of one Linear, its weight stored quantized or not."""
    layer = Linear(*reversed(w.shape), bias=False, params_dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    if stored:
        layer.weight = torch.nn.Parameter(recipe.weight_quantizer().quantize(w))
    layer.fp8_scale = torch.tensor(list(SCALES.values()))[:, None]
    layer.fp8_rng_state = torch.tensor(KEY)
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x)
        y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "primary"])
def test_fprop_dgrad_and_wgrad(name: str, dtype: torch.dtype, stored: bool) -> None:
    recipe, operands = RECIPES[name]
    operands = stored_operands(name) if stored else operands
    for size in SIZES:
        tensors = dict(zip(("x", "w", "dy"), numbers(*size, dtype), strict=True))
        op = {
            (role, usage): operands(role, usage, t.float().numpy(), em.OVERFLOW[dtype], None)
            for role, t in tensors.items()
            for usage in ("rowwise", "columnwise")
        }
        y, dx, dw = gradients(recipe, **tensors, stored=stored)
        assert y.dtype == dx.dtype == dw.dtype == dtype
        assert_within(y, op["x", "rowwise"], op["w", "rowwise"].T)
        assert_within(dx, op["dy", "rowwise"], op["w", "columnwise"])
        assert_within(dw, op["dy", "columnwise"].T, op["x", "columnwise"])


SPLITS = [40, 0, 1, 127, 33]


def stacked(layer: GroupedLinear, of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per GEMM, in either layout."""
    found = [of(layer.get_parameter(name)) for name in layer.weight_names()]
    return list(found[0]) if len(found) == 1 else found


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "primary"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "per-gemm"])
def test_every_group_is_quantized_by_itself(name: str, dtype: torch.dtype, stored: bool, grouped: bool) -> None:
    recipe, operands = RECIPES[name]
    operands = stored_operands(name) if stored else operands
    groups, k, n, rows = len(SPLITS), 160, 48, sum(SPLITS) + 5
    x, _, dy = numbers(rows, k, n, dtype)
    w = torch.stack([numbers(g + 1, k, n, dtype)[1] * (g + 1) for g in range(groups)])
    layer = GroupedLinear(groups, k, n, bias=False, single_grouped_weight=grouped, params_dtype=dtype)
    quantizer = recipe.weight_quantizer()
    with torch.no_grad():
        if not stored:
            layer.load_state_dict({f"weight{g}": w[g] for g in range(groups)})
        elif grouped:
            layer.weight = torch.nn.Parameter(quantizer.quantize_grouped(w))
        else:
            for g in range(groups):
                setattr(layer, f"weight{g}", torch.nn.Parameter(quantizer.quantize(w[g])))
    layer.fp8_scale = torch.tensor(list(SCALES.values()))[:, None].expand(-1, groups).contiguous()
    layer.fp8_rng_state = torch.tensor(KEY)
    x = x.requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x, torch.tensor(SPLITS))
    y.backward(dy)
    grads = stacked(layer, lambda weight: weight.grad)
    # wgrad's operands lie in rows padded so that every group begins with a block, which random bits depend on
    align = 16 if isinstance(recipe, NVFP4BlockScaling) else 1
    padded = (rows + groups * (align - 1)) // align * align
    begin = slot = 0
    for g, size in enumerate(SPLITS):
        at, among = slice(begin, begin + size), {"rowwise": (begin, rows), "columnwise": (slot, padded)}
        begin, slot = begin + size, slot + -(-size // align) * align
        if size == 0:
            assert torch.count_nonzero(grads[g]) == 0
            continue
        op = {
            (role, usage): operands(role, usage, t.detach().float().numpy(), em.OVERFLOW[dtype], among[usage])
            for role, t in (("x", x[at]), ("w", w[g]), ("dy", dy[at]))
            for usage in ("rowwise", "columnwise")
        }
        assert_within(y[at], op["x", "rowwise"], op["w", "rowwise"].T)
        assert_within(x.grad[at], op["dy", "rowwise"], op["w", "columnwise"])
        assert_within(grads[g], op["dy", "columnwise"].T, op["x", "columnwise"])


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
