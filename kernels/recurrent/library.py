"""The two passes of rules that carry a state as functions of tensors on a CPU: see `kernels/cpp/recurrent.cpp`.

B batch, T tokens, Hk heads of q and k, H heads of v, K and V channels, M documents.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import cpp_library
from ..backend import Compiled
from ..gemm.gemv import without_instructions
from ..threads import threads_for

_P, _N, _FLOAT, _INT = ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "te_recurrent_forward": (_P, ctypes.POINTER(_N), _FLOAT, _INT),
    "te_recurrent_backward": (_P, ctypes.POINTER(_N), _FLOAT, _N, _INT),
}


@functools.cache
def _function(name: str, narrow: bool = False) -> Any:
    """Return a pass. narrow: with AVX2 alone."""
    defined = {"INPUT": "Float32"} | ({"NARROW": ""} if narrow else {})
    return cpp_library.function("recurrent.cpp", defined, name, _ARGUMENTS[name])


def _load(dtype: torch.dtype) -> None:
    for name in _ARGUMENTS:
        _function(name)


RULES = Compiled(
    "a rule with a state",
    _load,
    (torch.float32,),
    against=without_instructions,
    in_graphs="if there",
    gradients=True,
)


def recurrence_forward(operands: Sequence[Tensor | None], results: Sequence[Tensor | None], scale: float) -> None:
    """Write out [B, T, H, V], what tokens write (of the same shape, or None) and the states behind [M, H, K, V].

    operands: q, k, v, g, beta or None, initial states or None, starts or None, ends or None, as of `op.rule_fwd`; all
    of them contiguous and, but for the last two, float32.
    """
    tensors = [*operands, *results]
    _function("te_recurrent_forward")(_addresses(tensors), _sizes(operands), scale, _threads(operands, 1))


def recurrence_backward(
    operands: Sequence[Tensor | None], others: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of q, k, v, g, beta and initial states. others: what tokens wrote, and the gradients of out
    and of the states behind."""
    q, _, v, g, beta = operands[:5]
    assert q is not None and v is not None and g is not None
    states, threads, shared = others[2], _threads(operands, 3), v.shape[2] // q.shape[2]
    # heads that share one of q and k are one unit of work, unless some threads had none
    parts = min(shared, -(-threads // max(1, states.shape[0] * q.shape[2])))
    dq, dk = (torch.zeros(parts, *q.shape, dtype=torch.float32, device="cpu") for _ in "qk")
    dv, dg, dstate = (torch.empty(x.shape, dtype=torch.float32, device="cpu") for x in (v, g, states))
    if operands[7] is not None:  # tokens behind the last document have none
        dv, dg = dv.zero_(), dg.zero_()
    dbeta = None if beta is None else torch.zeros_like(beta)
    tensors = [*operands, *others, dq, dk, dv, dg, dbeta, dstate]
    _function("te_recurrent_backward")(_addresses(tensors), _sizes(operands), scale, parts, threads)
    return (*(x[0] if parts == 1 else x.sum(0) for x in (dq, dk)), dv, dg, dbeta, dstate)  # type: ignore[return-value]


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[None if x is None else x.data_ptr() for x in tensors])


def _sizes(operands: Sequence[Tensor | None]) -> Any:
    q, v, g, ends = operands[0], operands[2], operands[3], operands[7]
    assert q is not None and v is not None and g is not None
    (batch, tokens, heads, V), (key_heads, K) = v.shape, q.shape[2:]
    documents = batch if ends is None else ends.shape[0] - 1
    return (_N * 8)(batch, tokens, heads, heads // key_heads, K, V, documents, g.dim() == 4)


def _threads(operands: Sequence[Tensor | None], passes: int) -> int:
    """Return how many threads run this number of passes: one does 20 multiplications a nanosecond."""
    q, v = operands[0], operands[2]
    assert q is not None and v is not None
    return threads_for(v.numel() * q.shape[3] * passes * 0.2)
