"""Public table lookup. Its gradient is a registered op, opaque to the compiler.

Inductor's own is one scalar atomic addition per element into a float32 table of all V rows, then a pass to round it:
19 ms of a 350 ms training step (T 512, H 512, V 8192, bf16, one thread), the largest kernel outside GEMM and attention.
This one takes 1 ms. PyTorch's eager gradient is as fast but adds in bfloat16, one rounding per use of a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..asserted import asserted
from ..compiling import compiling
from ..custom_op import like, operation


@operation("embedding_backward", lambda grad, num_rows: like(grad, (num_rows, grad.shape[1])))
def embedding_backward(grad: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Return the table's gradient: grad [T, H], ids [T] int64 -> [num_rows, H] in grad's dtype, float32 sums."""
    if grad.device.type == "cpu":
        return _sums_by_row(grad, ids, num_rows)
    # The device's own sorts the ids without telling the host how many there are, and adds in float32.
    return torch.ops.aten.embedding_dense_backward(grad, ids, num_rows, -1, False)


@operation("embedding_accumulate_", lambda: None, mutates=("main_grad",))
def embedding_accumulate_(main_grad: Tensor, grad: Tensor, ids: Tensor) -> None:
    """Add each use's gradient, grad [T, H], to its row `ids[t]` of main_grad [V, H], a float32 tensor."""
    main_grad.index_add_(0, ids, grad.to(main_grad.dtype))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, main_grad: Tensor | None, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.main_grad, ctx.padding_idx = weight.shape[0], main_grad, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            grad = grad.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
        if ctx.main_grad is None:
            return None, embedding_backward(grad.flatten(0, -2), ids.flatten(), ctx.num_rows), None, None
        embedding_accumulate_(ctx.main_grad, grad.flatten(0, -2), ids.flatten())
        return None, None, None, None


def embedding(ids: Tensor, weight: Tensor, main_grad: Tensor | None = None, padding_idx: int | None = None) -> Tensor:
    """Return the rows `weight[ids]`: ids [...] int64, weight [V, H] -> [..., H]. Raises IndexError for an id outside
    the table (a graph: RuntimeError). Differentiable once in weight; its gradient is added to main_grad, [V, H]
    float32, and autograd gets none, where that is given. padding_idx: a row whose gradient is zero, as torch's."""
    if torch.compiler.is_compiling() and compiling():
        rows = weight.shape[0]
        asserted(((ids >= 0) & (ids < rows)).all(), f"a token id or position is outside of its table of {rows} rows")
    return _Embedding.apply(ids, weight, main_grad, padding_idx)


def _sums_by_row(grad: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Return the table's gradient: [T, H], ids [T] int64 -> [num_rows, H] in grad's dtype.

    A row's uses are added in float32 in the order of T and rounded once. Only the rows in use are added up; the others
    cost their zeros.
    """
    used, place = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(used.shape[0], grad.shape[1], dtype=torch.float32, device=grad.device)
    sums.index_add_(0, place, grad.float())
    out = torch.zeros(num_rows, grad.shape[1], dtype=grad.dtype, device=grad.device)
    out[used] = sums.to(grad.dtype)
    return out
