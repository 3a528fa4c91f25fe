"""The short convolution on CUDA by the kernels of `causal-conv1d`, as an operation; nothing of it is imported before a
call.

The backward pass runs the forward pass of the library again, and then its backward pass.
"""

import importlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import like, operation, register_gradient
from ..documents import begins_of
from ..field import recomputed_gradients, served_by

_WIDTHS = (2, 3, 4)


def uses_convolution_library(x: Tensor, weight: Tensor) -> bool:
    """Whether the library convolves x; counts why not, on CUDA."""
    return served_by("short_convolution", "causal_conv1d", "causal-conv1d", x) and weight.shape[1] in _WIDTHS


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As the public function. What documents need beside the library's sums is plain torch."""
    if cu_seqlens is not None or (documents is not None and initial_state is not None):
        from . import chunked

        return chunked.short_convolution(x, weight, bias, activation, initial_state, cu_seqlens, documents)
    width = weight.shape[1]
    rows = x.new_zeros(x.shape[0], x.shape[2], width - 1) if initial_state is None else initial_state.to(x.dtype)
    whole = torch.cat([rows.mT, x], 1)
    numbers = None
    last = whole[:, x.shape[1] :]
    if documents is not None:
        numbers = begins_of(documents, first=False).cumsum(1).int()
        same = F.pad(numbers, (width - 1, 0), value=-1)[:, x.shape[1] :] == numbers[:, -1:]
        last = torch.where(same[..., None], last, 0)
        return convolution_fwd(x, weight.to(x.dtype), bias, numbers, activation), last.mT
    return convolution_fwd(whole, weight.to(x.dtype), bias, None, activation)[:, width - 1 :], last.mT


@operation("short_convolution", lambda x: like(x, x.shape))
def convolution_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None, activation: str | None
) -> Tensor:
    """Return the convolution of x [B, T, D]. weight: [D, W]; numbers: [B, T] int32, of documents, or None."""
    with torch.no_grad():
        return _run(x, weight, bias, numbers, activation).contiguous()


@operation(
    "short_convolution_bwd",
    lambda x, weight: (like(x, x.shape), like(weight, weight.shape), like(weight, weight.shape[:1])),
)
def convolution_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; zeros for a bias that does not exist."""
    own = weight.new_zeros(weight.shape[:1]) if bias is None else bias
    dx, dweight, dbias = recomputed_gradients(_run, (x, weight, own), (numbers, activation), (grad,))
    return dx, dweight, dbias.to(weight.dtype)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None, activation: str | None) -> Tensor:
    convolve = importlib.import_module("causal_conv1d").causal_conv1d_fn
    return convolve(x.mT, weight, bias, seq_idx=numbers, activation=activation).mT


@register_gradient(convolution_fwd, saves=("x", "weight", "bias", "numbers", "activation"))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor | None]:
    dx, dweight, dbias = convolution_bwd(grad, saved.x, saved.weight, saved.bias, saved.numbers, saved.activation)
    return {"x": dx, "weight": dweight, "bias": None if saved.bias is None else dbias.to(saved.bias.dtype)}
