"""xIELU, an activation with learned numbers (Huang and Schlag, arXiv 2411.13010)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.layers.distributed.tensor_parallel import with_summed_gradient

from .build import Build

_BETA, _EPSILON, _START = 0.5, -1e-6, 0.8


class XIELU(nn.Module):
    """Above zero `a_p x^2 + b x` with `a_p = softplus(alpha_p)`, below it `a_n (expm1(min(x, eps)) - x) + b x` with
    `a_n = b + softplus(alpha_n)`. Parameters alpha_p, alpha_n: [1]; buffers beta, eps: [], stored and not trained."""

    beta: Tensor
    eps: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = build.parameter(1), build.parameter(1)
        self._group = None if build.tp_group is None or build.tp_size == 1 else build.tp_group.group_name
        dtype = build.params_dtype or torch.get_default_dtype()
        for name in ("beta", "eps"):
            self.register_buffer(name, torch.empty((), dtype=dtype, device=build.device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with a_p and a_n of 0.8, as in the paper."""
        self.alpha_p.fill_(math.log(math.expm1(_START)))
        self.alpha_n.fill_(math.log(math.expm1(_START - _BETA)))
        self.beta.fill_(_BETA)
        self.eps.fill_(_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., F] -> the same, computed in float32 and rounded once. Of ranks that split the layers each has some
        of the channels: the gradients of the numbers are summed over them."""
        alpha_p, alpha_n = self.alpha_p, self.alpha_n
        if self._group is not None:
            alpha_p, alpha_n = (with_summed_gradient(alpha, self._group) for alpha in (alpha_p, alpha_n))
        wide, beta = x.float(), self.beta.float()
        above, below = F.softplus(alpha_p.float()), beta + F.softplus(alpha_n.float())
        negative = (torch.expm1(torch.minimum(wide, self.eps.float())) - wide) * below
        return (torch.where(wide > 0, above * wide * wide, negative) + beta * wide).to(x.dtype)
