"""The addition of a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional.dense_gemms import bias_gradient
from ...module.parameters import empty_parameter
from ..call import Computed, Gradients, OperationArguments, OperationCall, OperationContext
from ..operation import BasicOperation


class Bias(BasicOperation):
    """`y = x + b`, in x's dtype. bias: [size], zero at first; x: [..., size]. Transformer Engine: `te.ops.Bias`."""

    def __init__(
        self, size: int, *, params_dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.bias = empty_parameter(size, params_dtype=params_dtype, device=device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start at zero."""
        self.bias.zero_()

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        return OperationArguments((self.bias,))

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        (bias,) = call.parameters
        return Computed(x + bias.to(x.dtype))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.constants = self.bias.dtype

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy, (bias_gradient(dy, ctx.constants) if ctx.needs.parameters[0] else None,))

    def extra_repr(self) -> str:
        return f"{self.size}"
