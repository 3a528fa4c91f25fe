"""The states from chunk to chunk of a linear recurrence: a loop, as one operation, so that graphs have one node for any
number of chunks.

N chunks, M batch times heads, K and V channels.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import like, operation, register_gradient


@operation("decayed_states", lambda x: like(x, x.shape))
def decayed_states(x: Tensor, decay: Tensor, initial: Tensor) -> Tensor:
    """Return S_n = decay_n S_{n-1} + x_n, [N, M, K, V]. x: [N, M, K, V]; decay: [N, M, K or 1, V or 1]; initial: [M, K,
    V]. Differentiable any number of times."""
    states = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = initial
    for n in range(x.shape[0]):
        state = torch.addcmul(x[n], decay[n], state, out=states[n])
    return states


@register_gradient(decayed_states, saves=("decay", "initial"), saves_results=(0,))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    decay, initial, (states,) = saved.decay, saved.initial, saved.results
    after = F.pad(decay[1:], (0, 0) * 3 + (0, 1))  # of the chunk behind each one
    of_states = decayed_states(grad.flip(0), after.flip(0), torch.zeros_like(initial)).flip(0)
    before = torch.cat([initial[None], states[:-1]])
    products = of_states * before
    for dim in (2, 3):
        products = products.sum(dim, keepdim=True) if decay.shape[dim] != products.shape[dim] else products
    return {"x": of_states, "decay": products, "initial": decay[0] * of_states[0]}
