"""The two passes as functions of tensors on a CPU, compiled where they are first called: see `kernels/cpp_library`.

B batch, S queries, L keys, N query heads, G key/value heads, D channels of q and k, Dv channels of v.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import cpp_library
from ..backend import Compiled
from ..custom_op import takes
from ..gemm.cpu import in_float32
from ..gemm.gemv import without_instructions
from ..quantize.cpu import rounding as shared
from ..threads import threads_for

DTYPES = shared.DTYPES
_P, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "te_flash_forward": (_P,) * 7 + (_FLOAT, _FLOAT, _INT),
    "te_flash_backward": (_P,) * 11 + (_FLOAT, _FLOAT, _INT),
}


_SIZES = """
    N % G == 0 if G else False; D % 16 == 0 and V % 16 == 0 and 0 < D <= 256 and 0 < V <= 256 and L > 0;
    not causal or S <= L"""
FORWARD_TAKES = takes(
    "q: T [B, S, N, D] rows; k: T [B, L, G, D] rows; v: T [B, L, G, V] rows; out: T [B, S, N, V] rows;"
    f"logsumexp: float32 [B, S, N]; causal: value; {_SIZES}",
    T=DTYPES,
)
BACKWARD_TAKES = takes(
    "grad: T [B, S, N, V] rows; q: T [B, S, N, D] rows; k: T [B, L, G, D] rows; v: T [B, L, G, V] rows;"
    "out: T [B, S, N, V] rows; logsumexp: float32 [B, S, N]; dq: T [B, S, N, D] rows; dk: T [B, L, G, D] rows;"
    f"dv: T [B, L, G, V] rows; causal: value; {_SIZES}",
    T=DTYPES,
)


@functools.cache
def _function(name: str, dtype: torch.dtype, floats: bool = False, narrow: bool = False) -> Any:
    """Return a pass for a dtype. floats: products are of float32 values, also where the CPU multiplies pairs of
    bfloat16; narrow: with AVX2 alone."""
    defined = {"INPUT": shared.NAMES[dtype]}
    defined |= {macro: "" for macro, wanted in (("FLOATS", floats), ("NARROW", narrow)) if wanted}
    file = "attention_forward.cpp" if name == "te_flash_forward" else "attention_backward.cpp"
    return cpp_library.function(file, defined, name, _ARGUMENTS[name])


def _load(dtype: torch.dtype, *passes: str) -> None:
    floats = in_float32(torch.empty(0, dtype=dtype, device="cpu"))
    for name in ("te_flash_forward", *passes):
        _function(name, dtype, floats)


BACKWARD = "te_flash_backward"
ATTENTION = Compiled(
    "attention",
    _load,
    (*DTYPES, BACKWARD),
    against=without_instructions,
    in_graphs="if there",
    gradients=True,
)
"""Its key is the dtype, and with gradients `BACKWARD`."""


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Write attention to `out` [B, S, N, Dv], and the log of each query's sum of exponentials to `logsumexp`, float32
    [B, S, N].

    q: [B, S, N, D]; k: [B, L, G, D]; v: [B, L, G, Dv]; q, k, v and out of one of DTYPES. D and Dv: multiples of 16 up
    to 256. At least one key; with `causal`, the queries belong to the last of at least as many keys and see no key
    behind themselves; a `window` counts the keys that a query sees, up to its position (0: all). scale: above zero.
    softcap: scores become `softcap * tanh(score / softcap)` (0: they stay). Scores and sums are float32.
    """
    q, k, v = (_with_rows(x) for x in (q, k, v))
    tensors = (q, k, v, out, logsumexp)
    FORWARD_TAKES.check_on_cpu("attention_forward", *tensors, causal)
    function = _function("te_flash_forward", q.dtype, in_float32(q))
    sizes, strides = _sizes(q, k, v, causal, window), _strides(tensors)
    function(*_addresses(tensors), sizes, strides, scale, softcap, _threads(q, v, 1))


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    into: Sequence[Tensor],
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Write the gradients of q, k and v to the tensors `into`, like them, from the results of `attention_forward`,
    whose sums may have more in them than these keys. grad: [B, S, N, Dv]."""
    grad, q, k, v, out = (_with_rows(x) for x in (grad, q, k, v, out))
    tensors = (grad, q, k, v, out, logsumexp, *into)
    BACKWARD_TAKES.check_on_cpu("attention_backward", *tensors, causal)
    function = _function("te_flash_backward", q.dtype, in_float32(q))
    sizes, strides = _sizes(q, k, v, causal, window), _strides(tensors)
    function(*_addresses(tensors), sizes, strides, scale, softcap, _threads(q, v, 3))


def _threads(q: Tensor, v: Tensor, passes: int) -> int:
    """Return how many threads run this number of passes over scores: one does 20 multiplications a nanosecond."""
    return threads_for(q.shape[:3].numel() * v.shape[1] * (q.shape[3] + v.shape[3]) * passes * 0.05)


def _with_rows(x: Tensor) -> Tensor:
    """Return x with channels that lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


def _sizes(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> Any:
    (batch, queries, heads, channels), (_, keys, groups, values) = q.shape, v.shape
    return (ctypes.c_int64 * 9)(batch, heads, groups, queries, keys, channels, values, causal, window)


def _strides(tensors: Sequence[Tensor]) -> Any:
    """Return of each tensor how far apart batches, positions and heads are."""
    return (ctypes.c_int64 * (3 * len(tensors)))(*[stride for x in tensors for stride in x.stride()[:3]])
