"""Norms."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.derivative import gradients_of
from te_models.kernels.norm import Norm, l2_norm
from te_models.kernels.without_autocast import autocast_dtype

from ....gemm.prologue import fused_output, fused_storage
from ....module.norm import flat_input, flat_parameter
from ...arguments import takes_also, takes_without_effect
from ...module.norm import LayerNorm as LayerNormModule
from ...module.norm import RMSNorm as RMSNormModule
from ..call import Computed, Gradients, Input, OperationArguments, OperationCall, OperationContext, QuantizedRows
from ..operation import BasicOperation


class NormConstants(NamedTuple):
    """Which norm, and the dtype that `torch.amp.autocast` makes the next GEMM compute in."""

    norm: Norm
    dtype: torch.dtype | None


class _NormOperation(BasicOperation):
    """What LayerNorm and RMSNorm share: each has the parameters and options of the module it inherits from.

    Where the next operation is a GEMM under a recipe, the result is handed over quantized.
    """

    normalized_shape: tuple[int, ...]

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        centered = isinstance(self, LayerNormModule)
        norm = Norm(centered, self.eps, self.zero_centered_gamma, self.cast_order)  # type: ignore[arg-type]
        return OperationArguments((self.weight, self.bias), constants=NormConstants(norm, autocast_dtype(device_type)))  # type: ignore[arg-type]

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        (weight, bias), (norm, gemm_dtype) = call.parameters, call.constants
        dtype = norm.output_dtype(x, weight, bias)
        several = len(self.normalized_shape) > 1  # then the norm and the GEMM have different rows
        fused = None if several else fused_output(call.next_input, dtype, gemm_dtype or dtype)
        y: Input
        if fused is None or call.next_input is None:
            rows = flat_input(x, self.normalized_shape)
            normed, statistics = norm.forward(rows, flat_parameter(weight), flat_parameter(bias))
            y = normed.view(x.shape)
        else:
            copies, statistics = norm.forward_quantized(x, weight, bias, *fused)
            y = QuantizedRows(fused_storage(call.next_input, copies, x.shape, dtype), x.shape)
        return Computed(y, (x, weight, bias, *statistics), notes=norm)

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)
        ctx.constants = computed.notes

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        x, weight, bias, *statistics = ctx.saved
        rows = [flat_input(t, self.normalized_shape) for t in (dy, x)]
        flat = flat_parameter(weight), flat_parameter(bias)
        dx, *of_parameters = ctx.constants.backward(*rows, *flat, tuple(statistics), ctx.needs.parameters)
        found = [None if g is None else g.view(self.normalized_shape) for g in of_parameters]
        return Gradients(dx.view(x.shape), tuple(found))


class LayerNorm(_NormOperation, LayerNormModule):
    """Layer norm; arguments: see `te_models.layers.LayerNorm`. Transformer Engine: `te.ops.LayerNorm`."""

    @takes_also(dtype="params_dtype")
    @takes_without_effect("sm_margin")
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)


class RMSNorm(_NormOperation, RMSNormModule):
    """Root mean square norm; arguments: see `te_models.layers.RMSNorm`. Transformer Engine: `te.ops.RMSNorm`."""

    @takes_also(dtype="params_dtype")
    @takes_without_effect("sm_margin")
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)


class L2Norm(BasicOperation):
    """`x / sqrt(sum(x^2) + eps)` over the last dimension, without parameters. Transformer Engine: `te.ops.L2Norm`."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return Computed(l2_norm(x, self.eps), (x,))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        ctx.save_for_backward(*computed.saved)
        ctx.constants = self.eps

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        (x,) = ctx.saved
        eps = ctx.constants
        (dx,) = gradients_of(lambda x: l2_norm(x, eps), (x,), dy)
        return Gradients(dx)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
