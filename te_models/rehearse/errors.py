"""What a format does to the operands and to the three products of a layer: signal to quantization noise, values lost.

    fprop y = x w^T     dgrad dx = dy w     wgrad dw = dy^T x

Everything is computed in float32 by the layers themselves, so that the noise is the format's alone. Of experts, signals
and noises are summed over all of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.layers import DelayedScaling, Linear, Recipe, autocast, set_rounding_seed
from te_models.layers.recipe.base import Role

from .observe import Product

OPERANDS = ("x.fprop", "x.wgrad", "weight.fprop", "weight.dgrad", "dy.dgrad", "dy.wgrad")
"""Each operand, and the product that it is quantized for: the first of its two rowwise, the other columnwise."""
PRODUCTS = ("y", "dx", "dw")
_ROLES: dict[str, Role] = {"x": "input", "weight": "weight", "dy": "grad_output"}
_SMALLEST_E4M3 = 2.0**-9


@dataclass
class Errors:
    """Sums over matrices. signal, noise: of each of OPERANDS and PRODUCTS; lost: of "x", "weight" and "dy" the nonzero
    values that became zero, those that were clamped, the blocks whose scale is pinned; counted: nonzero values, values
    and blocks that are not all zeros. fisher: the sum over rows of the squared change of the loss, to first order, that
    the noise of y makes."""

    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    lost: dict[str, list[float]] = field(default_factory=dict)
    counted: dict[str, list[float]] = field(default_factory=dict)
    fisher: float = 0.0

    def add(self, name: str, exact: Tensor, rounded: Tensor) -> None:
        """Count a tensor and what became of it."""
        self.signal[name] = self.signal.get(name, 0.0) + _energy(exact)
        self.noise[name] = self.noise.get(name, 0.0) + _energy(exact - rounded)

    def lose(self, name: str, lost: list[float], counted: list[float]) -> None:
        """Count values and blocks that were lost."""
        self.lost[name] = [a + b for a, b in zip(self.lost.get(name, [0.0] * 3), lost, strict=True)]
        self.counted[name] = [a + b for a, b in zip(self.counted.get(name, [0.0] * 3), counted, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return signal to noise in decibels (None where nothing was rounded), the shares that were lost, and the
        noise to signal of dw."""
        found: dict[str, Any] = {name: decibels(self.signal[name], self.noise[name]) for name in self.signal}
        for name, lost in self.lost.items():
            shares = [a / b if b else 0.0 for a, b in zip(lost, self.counted[name], strict=True)]
            found |= {f"{name}.{what}": s for what, s in zip(("flushed", "saturated", "pinned"), shares, strict=True)}
        ratio = self.noise["dw"] / self.signal["dw"] if self.signal.get("dw") else 0.0
        return found | {"fisher": self.fisher, "dw.noise": ratio}


def _energy(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) ** 2


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal / noise); None where there is no noise, or no signal."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def format_errors(product: Product, recipe: Recipe, earlier: Product | None = None) -> Errors:
    """Return what a recipe does to a layer's operands and products. earlier: what the layer multiplied a step before,
    from whose amaxes delayed scaling scales; ValueError without it where the recipe is DelayedScaling."""
    found = Errors()
    if isinstance(recipe, DelayedScaling) and earlier is None:
        raise ValueError("delayed scaling scales by an earlier step, which is missing")
    before = None if earlier is None else _largest(earlier)
    for x, weight, dy, exact in zip(product.x, product.weight, product.dy, product.exact, strict=True):
        operands = {"x": x.float(), "weight": weight.float(), "dy": dy.float()}
        scales = None
        if isinstance(recipe, DelayedScaling) and before is not None:
            maxima = recipe.fp8_format.value.max_fwd, recipe.fp8_format.value.max_fwd, recipe.fp8_format.value.max_bwd
            scales = {name: _scale(largest, before[name]) for name, largest in zip(_ROLES, maxima, strict=True)}
        for name, tensor in operands.items():
            _operand_errors(found, name, tensor, recipe, None if scales is None else scales[name])
        _product_errors(found, operands, exact, recipe, scales)
    return found


def _largest(product: Product) -> dict[str, float]:
    parts = {"x": product.x, "weight": product.weight, "dy": product.dy}
    return {name: max(float(t.abs().amax()) for t in tensors) for name, tensors in parts.items()}


def _scale(largest: float, amax: float) -> float:
    return largest / amax if amax > 0 else 1.0


def _operand_errors(found: Errors, name: str, x: Tensor, recipe: Recipe, scale: float | None) -> None:
    quantizer: Any = recipe.quantizers("Linear", "")
    quantizer = {"x": quantizer.input, "weight": quantizer.weight, "dy": quantizer.grad_output}[name]
    key = torch.tensor([0, 1], dtype=torch.int64, device=x.device) if quantizer.needs_key() else None
    if scale is not None:
        live = quantizer.with_state(torch.tensor(scale, dtype=torch.float32, device=x.device), None)
        fields, value = live.quantize_fields(x), live.value
        statistics = live.statistics(x)
        values = value.dequantize_fields(fields, torch.float32, x.shape)
        both = dict.fromkeys(("rowwise", "columnwise"), values)
        quantizer = value
    else:
        statistics = quantizer.statistics(x, key)
        fields = quantizer.quantize_fields(x, key)
        both = {}
        for usage in ("rowwise", "columnwise"):
            if both and quantizer.symmetric:  # one copy for both
                both[usage] = both["rowwise"]
                continue
            one = quantizer.member(usage).with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
            both[usage] = one.dequantize_fields(one.quantize_fields(x, key), torch.float32, x.shape)
    for operand, usage in zip(_of(name), ("rowwise", "columnwise"), strict=True):
        found.add(operand, x, both[usage])  # pyright: ignore[reportArgumentType]
    nonzero = float((x != 0).sum())
    pinned, blocks = _pinned(fields["rowwise_scale_inv"], x) if "rowwise_scale_inv" in fields else (0.0, 0.0)
    lost = [float(statistics["underflow"]) * nonzero, float(statistics["saturation"]) * x.numel(), pinned]
    found.lose(name, lost, [nonzero, float(x.numel()), blocks])


def _of(name: str) -> Iterator[str]:
    return (operand for operand in OPERANDS if operand.startswith(f"{name}."))


def _pinned(scale_inv: Tensor, x: Tensor) -> tuple[float, float]:
    """Return how many scales are at a limit of their format, and how many blocks have a value other than 0.

    A scale byte is at its limit at 0 and 254, an E4M3 scale at 0 and at its smallest number, a float32 one where its
    inverse is the largest number. What such a block needs lies beyond.
    """
    scale = scale_inv if scale_inv.dim() == 2 else scale_inv.reshape(1, -1)
    rows, columns = (-(-size // parts) for size, parts in zip(x.shape, scale.shape, strict=True))
    used = q.blockwise_amax(x, (rows, columns)) > 0
    if scale.dtype == torch.uint8:
        limit = (scale == 0) | (scale == 254)
    elif scale.dtype == torch.float8_e4m3fn:
        limit = scale.float() <= _SMALLEST_E4M3
    else:
        limit = scale.float() <= 1.0 / torch.finfo(torch.float32).max
    return float((limit & used).sum()), float(used.sum())


def _product_errors(
    found: Errors,
    operands: dict[str, Tensor],
    exact: dict[str, Tensor],
    recipe: Recipe,
    scales: dict[str, float] | None,
) -> None:
    x, weight, dy = operands["x"], operands["weight"], operands["dy"]
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.float32, device=weight.device)
    layer.weight.data = weight
    set_rounding_seed(layer, 0)
    if scales is not None:
        layer.fp8_scale = torch.tensor([[scales[name]] for name in _ROLES], dtype=torch.float32, device=x.device)
        layer.fp8_gradient = torch.stack((layer.fp8_gradient[0], layer.fp8_scale[2], layer.fp8_gradient[2]))
    x = x.detach().requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    found.add("y", exact["y"], y.detach())
    found.add("dx", exact["dx"], cast(Tensor, x.grad))
    found.add("dw", exact["dw"], cast(Tensor, layer.weight.grad))
    found.fisher += _energy(((y.detach() - exact["y"]) * dy).sum(-1))
