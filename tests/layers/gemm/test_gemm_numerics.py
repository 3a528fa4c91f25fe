"""The three GEMMs of Linear and GroupedLinear, plain or stored, against float64 products of quantized operands."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import te_models.layers as te
from te_models.layers.quantizer import Quantizer
from tests.layers import emulation as em
from tests.layers import emulation_nvfp4 as em4
from tests.layers.matrix_recipes import fresh

pytestmark = pytest.mark.usefixtures("each_backend")

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUBNORMAL = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""The distance of numbers of a dtype below its normal ones."""
SCALES = {"x": 40.0, "w": 2000.0, "dy": 3e5}
"""What delayed scaling is given to multiply with: some values are clamped."""
KEY = (77, 5)
"""Seed and counter of the stochastic rounding of dy."""

Among = tuple[int, int] | None
"""(first row, number of rows): where x stands in a matrix that is rounded at once, which decides its random bits."""
Operands = Callable[[str, str, np.ndarray, float, Among], np.ndarray]
"""(role, usage, x, overflow, among) -> the values that the GEMM is to multiply, in x's orientation."""


def assert_within(got: torch.Tensor, left: np.ndarray, right: np.ndarray) -> None:
    """Compare with left @ right. Accumulating K products in float32 in any order errs by at most K units of float32 on
    |left| @ |right|, scales in float32 by a few more; the result is rounded to its dtype by the GEMM and perhaps once
    more by the epilogue that multiplies with the scales; in a dtype's subnormal numbers rounding has a fixed size."""
    exact, magnitude = left @ right, np.abs(left) @ np.abs(right)
    accumulation = (left.shape[1] + 8) * UNIT[torch.float32] * magnitude
    bound = accumulation + 2.01 * UNIT[got.dtype] * (np.abs(exact) + accumulation) + SUBNORMAL[got.dtype] + 1e-37
    error = np.abs(got.detach().double().numpy() - exact)
    assert (error <= bound).all(), f"error exceeds its bound by {np.max(error / bound):.3g}x"


def per_tensor(gradient: em.Format = em.E5M2, **options) -> Operands:
    return lambda role, usage, x, *_: em.per_tensor(x, gradient if role == "dy" else em.E4M3, **options).values


def delayed(role: str, usage: str, x: np.ndarray, overflow: float, among: Among) -> np.ndarray:
    fmt, scale = em.E5M2 if role == "dy" else em.E4M3, np.float32(SCALES[role])
    return fmt.decode(em.cast(x, scale, fmt)) * float(np.float32(1) / scale)


def blocks(size: int, kind: str, square: str, gradient: em.Format = em.E4M3, epsilon: float = 0.0) -> Operands:
    """1 x size blocks along the contracted dimension, size x size ones for the role `square`."""

    def values(role: str, usage: str, x: np.ndarray, overflow: float, among: Among) -> np.ndarray:
        block = (size, size) if role == square else (1, size) if usage == "rowwise" else (size, 1)
        return em.quantize(x, block, gradient if role == "dy" else em.E4M3, kind, overflow, epsilon).values

    return values


def nvfp4(square: bool = True, rotated: bool = True, stochastic: bool = True) -> Operands:
    def values(role: str, usage: str, x: np.ndarray, overflow: float, among: Among) -> np.ndarray:
        if role == "w" and square:
            return em4.quantize(x, 16).values
        rowwise = usage == "rowwise"
        turned = x if rowwise else x.T
        if role != "w" and not rowwise and rotated:
            turned = em4.rotate(em4.to_bfloat16(turned))
        bits = None
        if role == "dy" and stochastic:
            length = turned.shape[0 if rowwise else 1]
            begin, rows = among or (0, length)
            bits = em4.random_bits(*KEY, int(not rowwise), (rows, x.shape[1]) if rowwise else (x.shape[1], rows))
            bits = bits[begin : begin + length] if rowwise else bits[:, begin : begin + length]
        found = em4.quantize(turned, 1, bits).values
        return found if rowwise else found.T

    return values


def custom(role: str, usage: str, x: np.ndarray, overflow: float, among: Among) -> np.ndarray:
    """Those of the custom recipe of `matrix_recipes`."""
    if usage == "rowwise" and role != "dy":
        return em.quantize(x, (1, 32), em.E4M3, "e8m0").values
    if usage == "rowwise" or role == "w":
        return em.per_tensor(x, em.E5M2 if role == "dy" else em.E4M3).values
    return em.quantize(x, (128, 1), em.E4M3, "pow2", overflow).values


def _only_fprop(role: te.QuantizerRole) -> Quantizer:
    if role.tensor_type == "grad_output":
        return te.IdentityQuantizer()
    return te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(two_dimensional=True), columnwise_quantizer=te.IdentityQuantizer()
    )


def only_fprop(role: str, usage: str, x: np.ndarray, overflow: float, among: Among) -> np.ndarray:
    quantized = role != "dy" and usage == "rowwise"
    return em.quantize(x, (32, 32), em.E4M3, "e8m0").values if quantized else x.astype(np.float64)


RECIPES: dict[str, tuple[te.Recipe, Operands]] = {
    "delayed": (te.DelayedScaling(), delayed),
    "current": (te.Float8CurrentScaling(), per_tensor()),
    "current pow2": (
        te.Float8CurrentScaling(fp8_format=te.Format.E4M3, use_power_2_scales=True, amax_epsilon=0.01),
        per_tensor(em.E4M3, pow2=True, epsilon=0.01),
    ),
    "block": (te.Float8BlockScaling(), blocks(128, "pow2", "w")),
    "block float32": (te.Float8BlockScaling(use_f32_scales=True), blocks(128, "float32", "w")),
    "block 1-D w": (te.Float8BlockScaling(w_block_scaling_dim=1), blocks(128, "pow2", "none")),
    "block 2-D x": (
        te.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1, fp8_format=te.Format.HYBRID),
        blocks(128, "pow2", "x", em.E5M2),
    ),
    "block 2-D dy float32": (
        te.Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1, use_f32_scales=True, amax_epsilon=1e-3),
        blocks(128, "float32", "dy", epsilon=1e-3),
    ),
    "mxfp8": (te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID), blocks(32, "e8m0", "none", em.E5M2)),
    "mxfp8 2-D": (te.MXFP8BlockScaling(enable_2d_quantization=True), blocks(32, "e8m0", "w")),
    "nvfp4": (te.NVFP4BlockScaling(), nvfp4()),
    "nvfp4 no transform": (te.NVFP4BlockScaling(disable_rht=True), nvfp4(rotated=False)),
    "nvfp4 to nearest": (te.NVFP4BlockScaling(disable_stochastic_rounding=True), nvfp4(stochastic=False)),
    "nvfp4 1-D w": (te.NVFP4BlockScaling(disable_2d_quantization=True), nvfp4(square=False)),
    "nvfp4 plain": (
        te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        nvfp4(square=False, rotated=False, stochastic=False),
    ),
    "custom": (fresh("custom"), custom),
    "custom fprop": (te.CustomRecipe(qfactory=_only_fprop), only_fprop),
}


def stored_operands(name: str) -> Operands:
    """Return the operands of a recipe where weights are stored quantized: under delayed scaling, by their own amax."""
    operands = RECIPES[name][1]
    if name != "delayed":
        return operands
    return lambda role, *rest: (per_tensor() if role == "w" else operands)(role, *rest)


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
    recipe: te.Recipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, stored: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx and dw of one Linear, its weight stored quantized or not."""
    layer = te.Linear(*reversed(w.shape), bias=False, params_dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    if stored:
        layer.weight = torch.nn.Parameter(recipe.weight_quantizer().quantize(w))
    layer.fp8_scale = torch.tensor(list(SCALES.values()))[:, None]
    layer.fp8_rng_state = torch.tensor(KEY)
    x = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(x)
        y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
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


def stacked(layer: te.GroupedLinear, of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
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
    layer = te.GroupedLinear(groups, k, n, bias=False, single_grouped_weight=grouped, params_dtype=dtype)
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
    with te.autocast(recipe=recipe):
        y = layer(x, torch.tensor(SPLITS))
    y.backward(dy)
    grads = stacked(layer, lambda weight: weight.grad)
    # wgrad's operands lie in rows padded so that every group begins with a block, which random bits depend on
    align = 16 if isinstance(recipe, te.NVFP4BlockScaling) else 1
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


WITHOUT = te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
WITH = te.NVFP4BlockScaling(disable_stochastic_rounding=True)


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
    assert np.linalg.norm(error) < 0.3 * np.linalg.norm(exact) and difference.max() > 0
