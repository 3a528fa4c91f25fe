"""Public rotary embedding. On CPU the reference runs, eager or fused by Inductor; on an accelerator one registered op.

The tables are the reference's everywhere: they are made once per step and shared by all layers.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from te_models.suggestions import check_choice

from ..backend import definitions_only
from ..cpu_rows import apply_rope as rotate_rows
from ..custom_op import FLOATS, like, operation, register_gradient, takes
from . import reference

_TAKES = takes(
    f"x: {FLOATS} [B, S, N, D]; cos: float32 [C, S, P]; sin: float32 [C, S, P]; C == B or C == 1; 2 * P <= D"
)


@operation("rope", lambda x: like(x), takes=_TAKES)
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate x [B, S, N, D] by the angles of cos, sin, float32 [B or 1, S, R/2]; inverse: by their negatives.

    Runs in Triton. Differentiable in x, any number of times.
    """
    from . import triton

    return triton.rope(x, cos, sin, interleaved, inverse)


@register_gradient(rope, saves=("cos", "sin", "interleaved", "inverse"))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    return {"x": rope(grad, saved.cos, saved.sin, saved.interleaved, not saved.inverse)}


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str = "half") -> Tensor:
    """Rotate the first R channels of x by the tables' angles.

    x: [B, S, N, D]; cos, sin: [B or 1, S, R/2] from `rope_tables`; style: "half" or "interleaved". Returns
    [B, S, N, D] in x's dtype. Differentiable in x. Raises ValueError for another style, tables wider than x, or on an
    accelerator tables that want a gradient.
    """
    reference.check_rope(x, cos, style)
    if x.device.type != "cuda" or definitions_only() or _TAKES.misfit(x, cos, sin):
        rotated = rotate_rows(x, cos, sin, style == "interleaved")
        return reference.apply_rope(x, cos, sin, style) if rotated is None else rotated
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("the tables want a gradient, which the kernel does not compute; pass cos.detach()")
    return rope(x, cos, sin, style == "interleaved", False)


SCALINGS = ("none", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def rope_frequencies(
    head_dim: int,
    base: float,
    *,
    rotary_percent: float = 1.0,
    scaling: str = "none",
    max_position_embeddings: int | None = None,
    factor: float | None = None,
    original_max_position_embeddings: int | None = None,
    low_freq_factor: float | None = None,
    high_freq_factor: float | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool | None = None,
    alpha: float | None = None,
    short_factor: Sequence[float] | None = None,
    long_factor: Sequence[float] | None = None,
    sequence_length: Tensor | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, float]:
    """Return (inverse frequencies, float32 [R/2]; the factor that cos and sin are multiplied by).

    max_position_embeddings: the model's; original_max_position_embeddings: of its first training (default: the
    model's). sequence_length: int64 scalar tensor, read by "dynamic" and "longrope" only, without a host
    synchronisation; None means a short sequence. Raises ValueError for an unknown scaling or a missing argument.
    """
    if scaling not in SCALINGS:
        check_choice("scaling", scaling, SCALINGS)
    if scaling == "proportional":
        return _proportional(head_dim, base, rotary_percent, factor or 1.0, device), 1.0
    rotated = int(head_dim * rotary_percent)
    if rotated % 2 or rotated == 0:
        raise ValueError(
            f"rotary_percent is {rotary_percent}: it rotates {rotated} of {head_dim} channels, not an even number"
        )
    original = original_max_position_embeddings or max_position_embeddings
    if scaling == "dynamic":
        if alpha is not None:
            return _plain(rotated, base * alpha ** (rotated / (rotated - 2)), device), 1.0
        trained = _need("max_position_embeddings", original)
        return _dynamic(rotated, base, _need("factor", factor), trained, sequence_length, device), 1.0
    if scaling == "longrope":
        original = _need("original_max_position_embeddings", original)
        factor = factor if factor is not None else _need("max_position_embeddings", max_position_embeddings) / original
        short, long = (
            _divided(rotated, base, _divisors(name, values, rotated), device)
            for name, values in (("short_factor", short_factor), ("long_factor", long_factor))
        )
        frequencies = short if sequence_length is None else torch.where(sequence_length > original, long, short)
        if attention_factor is None:
            attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return frequencies, attention_factor
    if scaling == "yarn":
        original = _need("original_max_position_embeddings", original)
        factor = _need("factor", factor)
        truncate = True if truncate is None else truncate
        frequencies = _yarn(rotated, base, factor, original, beta_fast or 32.0, beta_slow or 1.0, truncate, device)
        if attention_factor is None:
            if mscale and mscale_all_dim:
                attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
            else:
                attention_factor = _yarn_mscale(factor, 1.0)
        return frequencies, attention_factor
    frequencies = _plain(rotated, base, device)
    if scaling == "linear":
        frequencies = frequencies / _need("factor", factor)
    elif scaling == "llama3":
        frequencies = _llama3(
            frequencies,
            _need("factor", factor),
            _need("low_freq_factor", low_freq_factor),
            _need("high_freq_factor", high_freq_factor),
            _need("original_max_position_embeddings", original),
        )
    return frequencies, 1.0


def _need(name: str, value):
    if value is None:
        raise ValueError(f"this rope scaling needs {name}, which is None")
    return value


def _exponents(rotated: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated


def _plain(rotated: int, base: float | Tensor, device: torch.device | str | None) -> Tensor:
    return 1.0 / (base ** _exponents(rotated, device))


def _dynamic(
    rotated: int, base: float, factor: float, trained: int, length: Tensor | None, device: torch.device | str | None
) -> Tensor:
    short = _plain(rotated, base, device)
    if length is None:
        return short
    stretch = (factor * torch.clamp(length, min=trained) / trained) - (factor - 1)
    return torch.where(length > trained, _plain(rotated, base * stretch ** (rotated / (rotated - 2)), device), short)


def _divisors(name: str, values: Sequence[float] | None, rotated: int) -> Sequence[float]:
    values = _need(name, values)
    if len(values) != rotated // 2:
        raise ValueError(
            f"{name} has {len(values)} entries; allowed: {rotated // 2}, half of the {rotated} rotated channels"
        )
    return values


def _divided(rotated: int, base: float, divisors: Sequence[float], device: torch.device | str | None) -> Tensor:
    divisor = torch.tensor(divisors, dtype=torch.float32, device=device)
    return 1.0 / (divisor * base ** _exponents(rotated, device))


def _llama3(frequencies: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Divide wavelengths above original/low by factor, keep those below original/high, interpolate between."""
    wavelength = 2 * math.pi / frequencies
    slow = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    blend = (original / wavelength - low) / (high - low)
    between = (1 - blend) * slow / factor + blend * slow
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, slow)


def _yarn_mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(
    rotated: int,
    base: float,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    device: torch.device | str | None,
) -> Tensor:
    """Keep channels that turn more than beta_fast times over the original length, divide those below beta_slow."""

    def channel_of(turns: float) -> float:
        return (rotated * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = channel_of(beta_fast), channel_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(rotated // 2, dtype=torch.float32, device=device) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    powers = base ** _exponents(rotated, device)
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _proportional(head_dim: int, base: float, rotary_percent: float, factor: float, device) -> Tensor:
    turning = int(rotary_percent * head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device=device) / head_dim
    still = torch.zeros(head_dim // 2 - turning, dtype=torch.float32, device=device)
    return torch.cat((1.0 / base**exponents, still)) / factor
