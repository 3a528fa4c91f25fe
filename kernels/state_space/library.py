"""The scan of Mamba-2 on CUDA by the kernels of `mamba-ssm`, as an operation; nothing of it is imported before a call.

The backward pass runs the forward pass of the library again, and then its backward pass.
"""

import importlib
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import wide
from ..custom_op import Output, like, operation, register_gradient
from ..documents import in_one_row
from ..field import recomputed_gradients, served_by

_CHUNK = 256


def uses_scan_library(x: Tensor) -> bool:
    """Whether the library computes the scan of x; counts why not, on CUDA."""
    return served_by("state_space_scan", "mamba_ssm", "mamba-ssm", x)


class ScanOperands(NamedTuple):
    """The tensors of the public function but for the initial state."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As the public function."""
    if initial_state is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = x.new_zeros(rows, *x.shape[2:], B.shape[3], dtype=wide(x))
    D = A.new_zeros(A.shape) if D is None else D
    return state_space_fwd(x, dt, A, B, C, D, initial_state, cu_seqlens, documents)


def _results(operands: ScanOperands, initial_state: Tensor) -> tuple[Output, Output]:
    return like(operands.x, operands.x.shape), like(initial_state, initial_state.shape, torch.float32)


@operation("state_space_scan", _results)
def state_space_fwd(
    operands: ScanOperands, initial_state: Tensor, cu_seqlens: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `state_space_scan`."""
    with torch.no_grad():
        y, state = _run(*operands, initial_state, cu_seqlens, documents)
    return y.contiguous(), state.contiguous()


@operation(
    "state_space_scan_bwd",
    lambda operands, initial_state: tuple(like(z, z.shape) for z in (*operands, initial_state)),
)
def state_space_bwd(
    grad: Tensor,
    grad_state: Tensor,
    operands: ScanOperands,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the operands and of the initial state."""
    inputs = (*operands, initial_state)
    return recomputed_gradients(_run, inputs, (cu_seqlens, documents), (grad, grad_state))  # type: ignore[return-value]


def _run(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    B, C, state = B.to(x.dtype), C.to(x.dtype), initial_state.float()
    if documents is None and cu_seqlens is None:
        return scan(x, dt, A, B, C, _CHUNK, D=D, initial_states=state, return_final_states=True)
    of_rows = None
    if documents is not None:
        (x, dt, B, C), state, cu_seqlens, of_rows = in_one_row(documents, state, (x, dt, B, C))
    assert cu_seqlens is not None, "asked above"
    ends, y, states = cu_seqlens.tolist(), [], []
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        one, of_one = (z[:, begin:end] for z in (x, dt, B, C)), state[n : n + 1]
        its, its_dt, its_b, its_c = one
        found, after = scan(its, its_dt, A, its_b, its_c, _CHUNK, D=D, initial_states=of_one, return_final_states=True)
        y.append(found)
        states.append(after)
    out, after = torch.cat(y, 1), torch.cat(states)
    return (out, after) if of_rows is None else of_rows(out, after)


_INPUTS = (*ScanOperands._fields, "initial_state")


@register_gradient(state_space_fwd, saves=(*_INPUTS, "cu_seqlens", "documents"))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor, grad_state: Tensor) -> dict[str, Tensor]:
    operands = (*(getattr(saved, name) for name in _INPUTS), saved.cu_seqlens, saved.documents)
    return dict(zip(_INPUTS, state_space_bwd(grad, grad_state, *operands), strict=True))
