"""Rules that carry a state as differentiable operations of a CPU: the gated delta rule and linear attention, with a
decay for each head or for each channel of keys, float32.

Chunks of plain torch read and write every matrix of every chunk a dozen times, from memory where a sequence is long; in
C++ the scores of one head stay in the cache, halves that a causal mask hides are not computed, and documents begin
chunks.

B batch, T tokens, Hk heads of q and k, H heads of v, K and V channels, M documents.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..backend import PLAIN, Backend, choose
from ..compiling import compiling
from ..custom_op import Output, direct, like, operation, register_gradient, takes
from .library import RULES, recurrence_backward, recurrence_forward

_OPERANDS = """q: float32 [B, T, G, K]; k: float32 [B, T, G, K]; v: float32 [B, T, H, V];
    g: float32 [B, T, H, *C]; beta: float32 [B, T, H]?; initial_state: float32 [_, H, K, V]?;
    starts: bool [B, T]?; ends: int64 [_]?"""
_FIT = """G > 0 and H % G == 0; C in ((), (K,)); ends is None or ends.shape[0] > 0;
    initial_state is None or initial_state.shape[0] == (B if ends is None else ends.shape[0] - 1)"""
_TAKES = takes(f"{_OPERANDS}; {_FIT}")
_GRADIENTS_TAKE = takes(
    f"grad: float32 [B, T, H, V]; grad_states: float32 [D, H, K, V]; {_OPERANDS}; written: float32; {_FIT}; "
    "D == (B if ends is None else ends.shape[0] - 1); written.numel() == (0 if beta is None else v.numel())"
)


def uses_recurrence(*tensors: Tensor, decay: Tensor) -> bool:
    """Whether `run_recurrence` computes a rule of these tensors: plain ones on CPU, none of them float64, in eager code
    or a graph. decay: its logarithm, [B, T, H] or [B, T, H, K]."""
    if any(type(x) not in PLAIN or not x.dtype.is_floating_point for x in tensors):
        return False
    if any(x.device.type != "cpu" or x.dtype == torch.float64 for x in (*tensors, decay)):
        return False
    return choose(RULES, tensors[0], torch.float32) is not Backend.DEFINITION


def run_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, V] in v's dtype and the states behind each row, or each document [M, H, K, V], float32.

    Where `uses_recurrence`: S = exp(g) S; S = S + k (beta (v - S^T k))^T, or S + k v^T without beta; out = scale S^T q.
    g: [B, T, H] or [B, T, H, K].
    starts: [B, T] bool, where a state of zeros begins. cu_seqlens: [M + 1] int. Differentiable once.
    """
    tensors = (None if x is None else x.float().contiguous() for x in (q, k, v, g, beta, initial_state))
    ends = None if cu_seqlens is None else cu_seqlens.long().contiguous()
    starts = None if starts is None else starts.contiguous()
    call = rule_fwd if torch.compiler.is_compiling() and compiling() else _direct
    out, _, states = call(*tensors, starts, ends, scale)
    return out.to(v.dtype), states


def _results(k: Tensor, v: Tensor, beta: Tensor | None, ends: Tensor | None) -> tuple[Output, Output, Output]:
    documents = v.shape[0] if ends is None else ends.shape[0] - 1
    written = like(v, (0,) if beta is None else v.shape)
    return like(v, v.shape), written, like(v, (documents, v.shape[2], k.shape[3], v.shape[3]))


@operation("recurrent_rule", _results, takes=_TAKES)
def rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, what tokens write [B, T, H, V], empty without beta, and the states behind, as `run_recurrence`."""
    out, written, states = (torch.empty(o.shape, dtype=torch.float32, device="cpu") for o in _results(k, v, beta, ends))
    if ends is not None:  # tokens behind the last document have none
        out, written = out.zero_(), written.zero_()
    operands = [None if x is None else x.contiguous() for x in (q, k, v, g, beta, initial_state, starts, ends)]
    recurrence_forward(operands, (out, None if beta is None else written, states), scale)
    return out, written, states


_direct = direct(rule_fwd)


def _gradients(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, ends: Tensor | None
) -> tuple[Output, Output, Output, Output, Output, Output]:
    states = _results(k, v, beta, ends)[2]
    of_beta = like(v, (0,) if beta is None else beta.shape)
    return like(k, k.shape), like(k, k.shape), like(v, v.shape), like(g, g.shape), of_beta, states


@operation("recurrent_rule_bwd", _gradients, takes=_GRADIENTS_TAKE)
def rule_bwd(
    grad: Tensor,
    grad_states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    written: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta, empty without it, and initial_state, from a result of `rule_fwd`."""
    operands = [None if x is None else x.contiguous() for x in (q, k, v, g, beta, initial_state, starts, ends)]
    own = operands[2] if beta is None else written
    assert own is not None, "v"
    dq, dk, dv, dg, dbeta, dstate = recurrence_backward(
        operands, [x.contiguous() for x in (own, grad, grad_states)], scale
    )
    return dq, dk, dv, dg, g.new_empty(0) if dbeta is None else dbeta, dstate


@register_gradient(
    rule_fwd,
    saves=("q", "k", "v", "g", "beta", "initial_state", "starts", "ends", "scale"),
    saves_results=(1,),
    constant=(1,),
)
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor, grad_states: Tensor) -> dict[str, Tensor | None]:
    names = ("q", "k", "v", "g", "beta", "initial_state")
    operands = (*(getattr(saved, name) for name in names), saved.starts, saved.ends)
    found = rule_bwd(grad, grad_states, *operands, saved.results[0], saved.scale)
    return {n: x if getattr(saved, n) is not None else None for n, x in zip(names, found, strict=True)}
