"""The rules that carry a state, with inputs, one entry each: what the tests of all of them run over.

T tokens. A rule is called as `run(tensors, **options)` and `define(tensors, initial_state)`; tensors along tokens are
those named in `rows`, dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.gated_delta import gated_delta_rule, l2_normed
from te_models.kernels.gated_delta import reference as delta
from te_models.kernels.linear_attention import lightning_attention, linear_attention
from te_models.kernels.linear_attention import reference as linear
from te_models.kernels.short_convolution import reference as convolution
from te_models.kernels.short_convolution import short_convolution
from te_models.kernels.state_space import reference as spaces
from te_models.kernels.state_space import selective_scan, state_space_scan

Tensors = dict[str, Tensor]
K, V, WIDTH = 8, 12, 4
LENGTHS = (1, 2, 16, 17, 63, 64, 65, 193)
"""Up to three chunks and a token, around the sizes of chunks and blocks."""


class Rule(NamedTuple):
    """state: the shape of one initial state."""

    make: Callable[[int, int], Tensors]
    run: Callable[..., tuple[Tensor, Tensor]]
    define: Callable[..., tuple[Tensor, Tensor]]
    rows: tuple[str, ...]
    state: tuple[int, ...]


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _decay(*shape: int) -> Tensor:
    return -3 * torch.rand(*shape, dtype=torch.float64)


def _delta(batch: int, tokens: int, *, by_channel: bool) -> Tensors:
    heads = 4
    q, k = (l2_normed(_randn(batch, tokens, 2, K)) for _ in "qk")
    g = _decay(batch, tokens, heads, *((K,) if by_channel else ()))
    v, beta = _randn(batch, tokens, heads, V), torch.rand(batch, tokens, heads, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def _linear(batch: int, tokens: int) -> Tensors:
    q, k = (_randn(batch, tokens, 2, K) for _ in "qk")
    return {"q": q, "k": k, "v": _randn(batch, tokens, 4, V), "g": _decay(batch, tokens, 4)}


def _lightning(batch: int, tokens: int) -> Tensors:
    tensors = _linear(batch, tokens)
    del tensors["g"]
    return tensors | {"slopes": torch.tensor([0.01, 0.1, 1.0, 3.0], dtype=torch.float64)}


def _scan(batch: int, tokens: int) -> Tensors:
    steps = F.softplus(_randn(batch, tokens, 4))
    b, c = (_randn(batch, tokens, 2, K) for _ in "BC")
    return {"x": _randn(batch, tokens, 4, V), "dt": steps, "A": _decay(4), "B": b, "C": c, "D": _randn(4)}


def _selective(batch: int, tokens: int) -> Tensors:
    steps = F.softplus(_randn(batch, tokens, V))
    b, c = (_randn(batch, tokens, K) for _ in "BC")
    return {"x": _randn(batch, tokens, V), "dt": steps, "A": _decay(V, K), "B": b, "C": c, "D": _randn(V)}


def _convolution(batch: int, tokens: int) -> Tensors:
    return {"x": _randn(batch, tokens, V), "weight": _randn(V, WIDTH), "bias": _randn(V)}


def _define_lightning(tensors: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, slopes = tensors.values()
    return linear.linear_attention(q, k, v, -slopes.expand(v.shape[:3]), 1.0, state)


def _called(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return lambda tensors, **options: function(**tensors, **given, **options)


def _defined(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    return lambda tensors, state: function(*tensors.values(), *given, state)


_DELTA = {
    "run": _called(gated_delta_rule),
    "define": _defined(delta.gated_delta_rule, K**-0.5),
    "rows": ("q", "k", "v", "g", "beta"),
    "state": (4, K, V),
}
RULES: dict[str, Rule] = {
    "gated_delta": Rule(make=lambda b, t: _delta(b, t, by_channel=False), **_DELTA),  # type: ignore[arg-type]
    "gated_delta_by_channel": Rule(make=lambda b, t: _delta(b, t, by_channel=True), **_DELTA),  # type: ignore[arg-type]
    "linear_attention": Rule(
        _linear, _called(linear_attention), _defined(linear.linear_attention, 1.0), ("q", "k", "v", "g"), (4, K, V)
    ),
    "lightning": Rule(_lightning, _called(lightning_attention), _define_lightning, ("q", "k", "v"), (4, K, V)),
    "state_space": Rule(
        _scan, _called(state_space_scan), _defined(spaces.state_space_scan), ("x", "dt", "B", "C"), (4, V, K)
    ),
    "selective_scan": Rule(
        _selective, _called(selective_scan), _defined(spaces.selective_scan), ("x", "dt", "B", "C"), (V, K)
    ),
    "short_convolution": Rule(
        _convolution,
        _called(short_convolution, activation="silu"),
        _defined(convolution.short_convolution, "silu"),
        ("x",),
        (V, WIDTH - 1),
    ),
}


def part(rule: Rule, tensors: Tensors, begin: int, end: int) -> Tensors:
    """Return the tensors of the tokens from begin to end."""
    return {name: x[:, begin:end] if name in rule.rows else x for name, x in tensors.items()}


def cast(tensors: Tensors, rows: tuple[str, ...], dtype: torch.dtype) -> Tensors:
    """Return leaves that want gradients: those along tokens in a dtype, the others in it or float32, if it is lower."""
    other = torch.float32 if dtype == torch.bfloat16 else dtype
    return {
        name: x.to(dtype if name in rows and name not in ("g", "dt") else other).requires_grad_()
        for name, x in tensors.items()
    }
