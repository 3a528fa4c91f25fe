"""What versions of torch do differently, one function each."""

from __future__ import annotations

import torch
from torch import Tensor

TORCH_2_11 = torch.__version__ < "2.12"


def own_result(y: Tensor) -> Tensor:
    """Return y, the result of the forward of a `torch.autograd.Function`, as a tensor that no other value in it is.

    Compiled by torch 2.11, every value computed there becomes a result. Where the last step returned its argument, as a
    cast to the dtype that it has, two results are one tensor, and the gradient of the first is silently zero.
    """
    return y.view_as(y) if TORCH_2_11 and torch.compiler.is_compiling() else y
