"""Operations that work element by element, or only on the shape: biases, scales, dropout, and a second tensor that
joins or leaves, as at a residual branch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.suggestions import shown

from ....distributed.tensor_parallel import TensorParallelModule, TensorParallelSplit, split_group
from ....gemm.product import bias_gradient
from ....module.primary_weights import empty_parameter
from ...arguments import takes_also, takes_without_effect
from ..call import Computed, Gradients, Input, OperationArguments, OperationCall, OperationContext
from ..operation import BasicOperation


class Identity(BasicOperation):
    """`y = x`, quantized or not."""

    TAKES_QUANTIZED = True

    def op_forward_compute(self, x: Input, call: OperationCall) -> Computed:
        return Computed(x)

    def op_forward_save_ctx(self, ctx: OperationContext, x: Input, computed: Computed, call: OperationCall) -> None:
        """Nothing is needed."""

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy)


class ConstantScale(BasicOperation):
    """`y = scale x`, rounded once."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(x * self.scale)

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.constants = self.scale

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy * ctx.constants)

    def extra_repr(self) -> str:
        return f"{self.scale}"


class Dropout(BasicOperation):
    """Zero each element with probability p in training, and divide the others by 1 - p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p is {shown(p)}; allowed: a number from 0 on, below 1")
        self.p = p

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        if not self.training or self.p == 0:
            return Computed(x, (None,))
        mask = torch.rand_like(x, dtype=torch.float32) >= self.p
        return Computed(x * mask / (1 - self.p), (mask,))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)
        ctx.constants = 1 - self.p

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        (mask,) = ctx.saved
        return Gradients(dy if mask is None else dy * mask / ctx.constants)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Reshape(BasicOperation):
    """`y = x.reshape(shape)`; one entry may be -1. shape: numbers, or one sequence of them."""

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        sizes: Any = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        self.shape = torch.Size(sizes)

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(x.reshape(self.shape))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.constants = x.shape

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy.reshape(ctx.constants))

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))


class Bias(TensorParallelModule, BasicOperation):
    """`y = x + b`, in x's dtype. bias: [size], zero at first; x: [..., size]. Transformer Engine: `te.ops.Bias`.
    tensor_parallel: this rank has its part of `size` numbers, over tensor_parallel_group (None: all ranks)."""

    @takes_also(dtype="params_dtype")
    def __init__(
        self,
        size: int,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        mode = "column" if tensor_parallel else None
        group = split_group(mode, tensor_parallel_group)
        _, self.size = self.split_features(TensorParallelSplit(mode, group), 1, size)
        self.bias = empty_parameter(self.size, params_dtype=params_dtype, device=device)
        self.reset_parameters()
        self.mark_part(self.bias, self.split_dim(bias=True))

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


class AddExtraInput(BasicOperation):
    """`y = x + extra`. Transformer Engine: `te.ops.AddExtraInput`. in_place: the sum is written over the extra input,
    of x's shape and dtype, whose memory the result shares; autograd does not see that it is written to. ValueError for
    another shape or dtype then."""

    NUM_EXTRA_INPUTS = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        (extra,) = call.extra_inputs
        return Computed(self.into_extra(x, extra) if self.in_place else x + extra.to(x.dtype))

    @staticmethod
    def into_extra(x: Tensor, extra: Tensor) -> Tensor:
        """Add x to the extra input in place and return that."""
        if (extra.shape, extra.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"the extra input is {extra.dtype} {tuple(extra.shape)}; allowed with in_place: {x.dtype} "
                f"{tuple(x.shape)}, as the main input"
            )
        return extra.detach().add_(x)

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.constants = call.extra_inputs[0].dtype

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy, extra_inputs=(dy.to(ctx.constants) if ctx.needs.extra_inputs[0] else None,))


class MakeExtraOutput(BasicOperation):
    """`y = x`, and x is an extra output, too. Transformer Engine: `te.ops.MakeExtraOutput`. in_place, its leave to
    write over the gradient of the extra output, changes nothing: no gradient of others is written to."""

    NUM_EXTRA_OUTPUTS = 1

    @takes_without_effect("in_place")
    def __init__(self) -> None:
        super().__init__()

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(x, extra_outputs=(x,))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        """Nothing is needed."""

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        return Gradients(dy + extra_gradients[0])
