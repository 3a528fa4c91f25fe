"""The gated delta rule on CUDA by the kernels of `fla-core`, as an operation; nothing of it is imported before a call.

The backward pass runs the forward pass of the library again, and then its backward pass.
"""

import importlib
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import wide
from ..custom_op import Output, like, operation, register_gradient
from ..documents import in_one_row
from ..field import recomputed_gradients, served_by


def uses_gated_delta_library(v: Tensor, g: Tensor) -> bool:
    """Whether the library computes the rule of these tensors; counts why not, on CUDA."""
    return served_by("gated_delta_rule", "fla", "fla-core", v)


class DeltaOperands(NamedTuple):
    """The tensors of the public function that there always are."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def gated_delta_rule(
    x: DeltaOperands, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As the public function."""
    if initial_state is None:
        rows = x.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = x.v.new_zeros(rows, x.v.shape[2], x.k.shape[3], x.v.shape[3], dtype=wide(x.v))
    return delta_rule_fwd(*x, initial_state, cu_seqlens, documents, scale)


def _results(x: DeltaOperands, initial_state: Tensor) -> tuple[Output, Output]:
    return like(x.v), like(initial_state, dtype=torch.float32)


@operation("gated_delta_rule", _results)
def delta_rule_fwd(
    x: DeltaOperands, initial_state: Tensor, cu_seqlens: Tensor | None, documents: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As `gated_delta_rule`."""
    with torch.no_grad():
        out, state = _run(*x, initial_state, cu_seqlens, documents, scale)
    return out.contiguous(), state.contiguous()


@operation("gated_delta_rule_bwd", lambda x, initial_state: tuple(like(z, z.shape) for z in (*x, initial_state)))
def delta_rule_bwd(
    grad: Tensor,
    grad_state: Tensor,
    x: DeltaOperands,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the operands and of the initial state."""
    return recomputed_gradients(  # type: ignore[return-value]
        _run, (*x, initial_state), (cu_seqlens, documents, scale), (grad, grad_state)
    )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    home, name = ("gated_delta_rule", "chunk_gated_delta_rule") if g.dim() == 3 else ("kda", "chunk_kda")
    rule = getattr(importlib.import_module(f"fla.ops.{home}"), name)
    repeats, rows = v.shape[2] // k.shape[2], initial_state.shape[0]
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    state = initial_state.float()
    of_rows = None
    if documents is not None:
        (q, k, v, g, beta), state, cu_seqlens, of_rows = in_one_row(documents, state, (q, k, v, g, beta))
    dtype = torch.float32 if v.dtype == torch.float64 else v.dtype
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    out, state = rule(
        q, k, v, g.float(), beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
    )
    if of_rows is not None:
        out, state = of_rows(out, state)
    assert state.shape[0] == rows, "one state of each row or document"
    return out, state


_INPUTS = (*DeltaOperands._fields, "initial_state")


@register_gradient(delta_rule_fwd, saves=(*_INPUTS, "cu_seqlens", "documents", "scale"))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor, grad_state: Tensor) -> dict[str, Tensor]:
    constants = saved.cu_seqlens, saved.documents, saved.scale
    found = delta_rule_bwd(grad, grad_state, *(getattr(saved, name) for name in _INPUTS), *constants)
    return dict(zip(_INPUTS, found, strict=True))
