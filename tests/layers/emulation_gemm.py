"""The error bound of a GEMM on operands that are known exactly, and the operands of every recipe."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from te_models.layers import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from te_models.layers.quantizer import Quantizer
from tests.layers import emulation as em
from tests.layers import emulation_nvfp4 as em4
from tests.layers.matrix_recipes import fresh

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


def _only_fprop(role: QuantizerRole) -> Quantizer:
    if role.tensor_type == "grad_output":
        return IdentityQuantizer()
    return HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(two_dimensional=True), columnwise_quantizer=IdentityQuantizer()
    )


def only_fprop(role: str, usage: str, x: np.ndarray, overflow: float, among: Among) -> np.ndarray:
    quantized = role != "dy" and usage == "rowwise"
    return em.quantize(x, (32, 32), em.E4M3, "e8m0").values if quantized else x.astype(np.float64)


RECIPES: dict[str, tuple[Recipe, Operands]] = {
    "delayed": (DelayedScaling(), delayed),
    "current": (Float8CurrentScaling(), per_tensor()),
    "current pow2": (
        Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=True, amax_epsilon=0.01),
        per_tensor(em.E4M3, pow2=True, epsilon=0.01),
    ),
    "block": (Float8BlockScaling(), blocks(128, "pow2", "w")),
    "block float32": (Float8BlockScaling(use_f32_scales=True), blocks(128, "float32", "w")),
    "block 1-D w": (Float8BlockScaling(w_block_scaling_dim=1), blocks(128, "pow2", "none")),
    "block 2-D x": (
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1, fp8_format=Format.HYBRID),
        blocks(128, "pow2", "x", em.E5M2),
    ),
    "block 2-D dy float32": (
        Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1, use_f32_scales=True, amax_epsilon=1e-3),
        blocks(128, "float32", "dy", epsilon=1e-3),
    ),
    "mxfp8": (MXFP8BlockScaling(fp8_format=Format.HYBRID), blocks(32, "e8m0", "none", em.E5M2)),
    "mxfp8 2-D": (MXFP8BlockScaling(enable_2d_quantization=True), blocks(32, "e8m0", "w")),
    "nvfp4": (NVFP4BlockScaling(), nvfp4()),
    "nvfp4 no transform": (NVFP4BlockScaling(disable_rht=True), nvfp4(rotated=False)),
    "nvfp4 to nearest": (NVFP4BlockScaling(disable_stochastic_rounding=True), nvfp4(stochastic=False)),
    "nvfp4 1-D w": (NVFP4BlockScaling(disable_2d_quantization=True), nvfp4(square=False)),
    "nvfp4 plain": (
        NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        nvfp4(square=False, rotated=False, stochastic=False),
    ),
    "custom": (fresh("custom"), custom),
    "custom fprop": (CustomRecipe(qfactory=_only_fprop), only_fprop),
}


def stored_operands(name: str) -> Operands:
    """Return the operands of a recipe where weights are stored quantized: under delayed scaling, by their own amax."""
    operands = RECIPES[name][1]
    if name != "delayed":
        return operands
    return lambda role, *rest: (per_tensor() if role == "w" else operands)(role, *rest)
