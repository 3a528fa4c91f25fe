"""Muon (K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): momentum whose matrix is
replaced by the nearest one with singular values of about 1, by five Newton-Schulz steps in bfloat16.

Of a stack of experts [num_gemms, out, in] every member is orthogonalised by itself, in batched products; of a weight
that joins projections, such as q, k and v, each of them (as in arXiv 2502.16982). On matrices the numbers are the ones
of `torch.optim.Muon` with Nesterov momentum, of which this differs in what it reads and writes: `main_grad`, float32
masters, a float32 momentum, and a step that a tensor can switch off.

Where ranks have parts of a matrix, each puts the whole of its update together, orthogonalises it and keeps its part:
the ranks of a copy do the same work, so that nothing is sent back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.layers import QuantizedTensor, gradient_of
from te_models.layers.tensor.fsdp import local_part

from .whole_matrix import DividedMatrix

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic a x + b x^3 + c x^5, steepest at 0."""
EPSILON = 1e-7
STEPS = 5


def newton_schulz(update: Tensor) -> Tensor:
    """Return the orthogonalised matrices of [..., m, n], bfloat16: singular values between about 0.7 and 1.2."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(
        min=EPSILON
    )  # the spectral norm is at most the Frobenius norm
    stack = x.reshape(-1, *x.shape[-2:])
    for _ in range(STEPS):
        gram = stack @ stack.mT
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), stack, beta=A)
    x = stack.view_as(x)
    return x.mT if tall else x


def scale_of(shape: torch.Size, adjust: str) -> float:
    """Return what the learning rate of a matrix [..., m, n] is multiplied by: "match_rms_adamw" gives updates the root
    mean square of AdamW's (arXiv 2502.16982), "original" sqrt(max(1, m / n))."""
    m, n = shape[-2:]
    return 0.2 * math.sqrt(max(m, n)) if adjust == "match_rms_adamw" else math.sqrt(max(1, m / n))


def steps_of(update: Tensor, rows: Sequence[int], lr: Tensor, adjust: str) -> Tensor:
    """Return what is subtracted from matrices [..., m, n], float32: each `rows` of them orthogonalised and scaled."""
    found = [lr * scale_of(own.shape, adjust) * newton_schulz(own).float() for own in update.split(list(rows), -2)]
    return found[0] if len(found) == 1 else torch.cat(found, -2)


class Muon(torch.optim.Optimizer):
    """Muon for matrices and stacks of them.

    params: groups with "lr" (a scalar tensor) and "weight_decay". master_weights: keep a float32 master of parameters
    of fewer bits. divided: the parameters that ranks have parts of, of which `step` is a collective. joined: the rows
    of each matrix that a parameter joins; one of them where it is not named.

    State per parameter: "momentum_buffer" (float32) and "master". Raises ValueError for a parameter that is no matrix
    and no stack of matrices, or is stored quantized.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        adjust_lr: str = "match_rms_adamw",
        master_weights: bool = False,
        divided: Mapping[Tensor, DividedMatrix] | None = None,
        joined: Mapping[Tensor, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._divided, self._joined = divided or {}, joined or {}
        self.momentum, self.adjust_lr = momentum, adjust_lr
        for group in self.param_groups:
            for p in group["params"]:
                quantized = isinstance(local_part(p), QuantizedTensor)
                if p.dim() not in (2, 3) or quantized:
                    what = "stored quantized" if quantized else f"of shape {tuple(p.shape)}"
                    raise ValueError(f"Muon got a parameter that is {what}; allowed: matrices, and stacks of them")
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
                if master_weights and p.dtype.itemsize < 4:
                    self.state[p]["master"] = p.detach().float()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, noop: Tensor | None = None
    ) -> None:
        """Update the parameters from their gradients. noop: a scalar tensor; where it is nonzero nothing changes."""
        assert closure is None, "the gradients are there"
        for group in self.param_groups:
            for p in group["params"]:
                gradient = gradient_of(p)
                if gradient is None:
                    continue
                state = {name: local_part(value) for name, value in self.state[p].items()}
                own, gradient, whole = local_part(p), local_part(gradient).float(), self._divided.get(p)
                momentum = torch.lerp(state["momentum_buffer"], gradient, 1 - self.momentum)
                update = torch.lerp(gradient, momentum, self.momentum)
                weight = state.get("master", own).float()
                lr = group["lr"].to(weight.device)
                update = update if whole is None else whole.gather(update)
                step = steps_of(update, self._joined.get(p, update.shape[-2:-1]), lr, self.adjust_lr)
                new = weight * (1 - lr * group["weight_decay"]) - (step if whole is None else whole.own(step))
                if noop is not None:
                    momentum = torch.where(noop.bool(), state["momentum_buffer"], momentum)
                    new = torch.where(noop.bool(), weight, new)
                state["momentum_buffer"].copy_(momentum)
                if "master" in state:
                    state["master"].copy_(new)
                own.copy_(new)
