"""The states from chunk to chunk of the gated delta rule: a loop, as one operation, so that graphs have one node for
any number of chunks.

N chunks, M batch times heads, C tokens of a chunk, K and V channels.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..custom_op import Output, like, operation, register_gradient


def _results(w: Tensor, u: Tensor) -> tuple[Output, Output]:
    return like(u, (*u.shape[:2], w.shape[3], u.shape[3])), like(u)


@operation("delta_states", _results)
def delta_states(w: Tensor, u: Tensor, k: Tensor, decay: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state behind each chunk [N, M, K, V], and what tokens write, u - w S [N, M, C, V], from the state S
    before their chunk: S = decay S + k^T (u - w S).

    w, k: [N, M, C, K]; u: [N, M, C, V]; decay: [N, M, K] or [N, M, 1]; initial: [M, K, V]. Differentiable once.
    """
    states, values = (torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in _results(w, u))
    state = initial
    for n in range(u.shape[0]):
        torch.baddbmm(u[n], w[n], state, alpha=-1, out=values[n])
        state = torch.baddbmm(decay[n][:, :, None] * state, k[n].mT, values[n], out=states[n])
    return states, values


def _gradients(
    w: Tensor, values: Tensor, k: Tensor, decay: Tensor, initial: Tensor
) -> tuple[Output, Output, Output, Output, Output]:
    return like(w, w.shape), like(w, values.shape), like(w, k.shape), like(w, decay.shape), like(w, initial.shape)


@operation("delta_states_bwd", _gradients)
def delta_states_bwd(
    grad_states: Tensor,
    grad_values: Tensor,
    w: Tensor,
    k: Tensor,
    decay: Tensor,
    initial: Tensor,
    states: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of w, u, k, decay and initial of `delta_states`, from its results."""
    du, of_states = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (values, states))
    grad = torch.zeros(initial.shape, dtype=initial.dtype, device=initial.device)
    for n in reversed(range(values.shape[0])):
        torch.add(grad, grad_states[n], out=of_states[n])
        torch.baddbmm(grad_values[n], k[n], of_states[n], out=du[n])
        grad = torch.baddbmm(decay[n][:, :, None] * of_states[n], w[n].mT, du[n], alpha=-1)
    before = torch.cat([initial[None], states[:-1]])
    dw = (du @ before.mT).neg_()
    ddecay = (of_states * before).sum(-1)
    ddecay = ddecay if decay.shape[2] == ddecay.shape[2] else ddecay.sum(-1, keepdim=True)
    return dw, du, values @ of_states.mT, ddecay, grad


@register_gradient(delta_states, saves=("w", "k", "decay", "initial"), saves_results=(0, 1))
def _backward(saved: SimpleNamespace, needs: set[str], grad_states: Tensor, grad_values: Tensor) -> dict[str, Tensor]:
    operands = (grad_states, grad_values, saved.w, saved.k, saved.decay, saved.initial, *saved.results)
    return dict(zip(("w", "u", "k", "decay", "initial"), delta_states_bwd(*operands), strict=True))
