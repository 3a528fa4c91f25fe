"""One GEMM per group of rows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.without_autocast import autocast_dtype, require_floating

from ....gemm.plain import largest
from ....gemm.product import bias_rows_gradient
from ....gemm.rows import Groups, row_alignment
from ....gemm.scaling import GemmConfig, Scaling
from ....gemm.three_gemms import fprop, gradients, stacked_values
from ....gemm.wgrad import main_grads
from ....quantizer.delayed import update_amax_
from ....quantizer.group_offsets import GroupOffsets
from ....quantizer.state import QuantizerState
from ....recipe.base import HIGH_PRECISION
from ...arguments import THEIR_NAMES, takes_also, takes_at_default
from ...module.grouped_linear import GroupedLinear as GroupedLinearModule
from ..call import Computed, Gradients, OperationArguments, OperationCall, OperationContext
from ..operation import BasicOperation

_STATE = len(QuantizerState._fields)


class GroupedConstants(NamedTuple):
    """What a grouped linear operation computes with. weights: how many of the parameters are weights; the others are
    biases; dtype: of the GEMMs where `torch.amp.autocast` decides, else None."""

    config: GemmConfig
    weights: int
    dtype: torch.dtype | None


class GroupedLinear(BasicOperation, GroupedLinearModule):
    """`y[g] = x[g] w[g]^T + b[g]`; arguments: see `te_models.layers.GroupedLinear`. Extra input: m_splits [num_gemms],
    the rows per group, a tensor. scale_bias: a second extra input, scales [T], multiplies the bias of each row:
    `y[g] = x[g] w[g]^T + scales b[g]`. Transformer Engine: `te.ops.GroupedLinear`. ValueError for scales of another
    shape."""

    NUM_EXTRA_INPUTS = 1

    @takes_also(num_groups="num_gemms", **THEIR_NAMES)
    @takes_at_default(rng_state_tracker_function=None, return_bias=False)
    def __init__(self, *arguments: Any, scale_bias: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scale_bias = scale_bias and self.use_bias
        self.NUM_EXTRA_INPUTS = 2 if self.scale_bias else 1

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        weights, biases = self.members()
        if biases and self.parallel_mode == "row":
            raise ValueError("a row-parallel ops.GroupedLinear has no bias: it belongs after the sum over ranks")
        cached = self.cached_weight(weights, None)
        quantizers, options = self.gemm_quantizers(), self.gemm_options(*weights)
        recorded = None
        if self.calibrating():
            self.calibrate("weight", largest(stacked_values(weights)))
            recorded = self.calibration_amax("input")
        quantizers = quantizers or HIGH_PRECISION
        constants = GroupedConstants(GemmConfig(quantizers, options, None), len(weights), autocast_dtype(device_type))
        tensors = (cached, recorded, *self.live_state(quantizers), *main_grads(options.wgrad))
        return OperationArguments((*weights, *biases), tensors, constants)

    def op_forward_compute(self, x: Tensor, call: OperationCall) -> Computed:
        return self.compute_rows(x, self.rows_of(x, call), call)

    def rows_of(self, x: Tensor, call: OperationCall) -> GroupOffsets:
        """Locate the rows of x by the splits. ValueError where there is not one per GEMM."""
        self.check_splits(call.extra_inputs[0], x.shape[0])
        return GroupOffsets.of(call.extra_inputs[0], x.shape[0])

    def compute_rows(self, x: Tensor, rows: GroupOffsets, call: OperationCall) -> Computed:
        """Return the forward pass over rows that are located already."""
        cached, recorded, *tensors = call.tensors
        constants: GroupedConstants = call.constants
        weights, biases = call.parameters[: constants.weights], call.parameters[constants.weights :]
        require_floating(x.dtype)
        matrix = x.to(constants.dtype or x.dtype)
        if recorded is not None:
            update_amax_(recorded, rows.amax(matrix))
        scaling = Scaling(constants.config, QuantizerState(*tensors[:_STATE]))
        needs = (call.needs.input, any(call.needs.parameters[: constants.weights]))
        groups = _groups(rows, constants, matrix.dtype)
        y, forms, tensors = fprop(matrix, weights, None, cached, groups, scaling, matrix.dtype, needs)
        if biases:
            bias = biases[0] if biases[0].dim() == 2 else torch.stack(biases)
            y = y + (_scaled_rows(rows, bias, *call.extra_inputs[1:]).to(y.dtype))
        return Computed(y, (*rows.tensors(), *tensors), notes=(forms, matrix.dtype))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Tensor, computed: Computed, call: OperationCall) -> None:
        cached, _, *tensors = call.tensors
        state, into = QuantizerState(*tensors[:_STATE]), tensors[_STATE:]
        weights = call.parameters[: call.constants.weights]
        rows, tensors = computed.saved[:3], computed.saved[3:]
        biases = call.parameters[call.constants.weights :]
        scales, of_scales = (call.extra_inputs[1], biases) if self.scale_bias else (None, ())
        ctx.save_for_backward(*rows, cached, state.scale, state.key, scales, *weights, *of_scales, *tensors)
        ctx.save_live(state.gradient, state.gradient_log, state.grad_statistics, *into)
        of_bias = (biases[0].dtype, biases[0].dim() == 2) if biases else (None, False)
        ctx.constants = (call.constants, x.dtype, *of_bias, *computed.notes)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        m_splits, ends, group, cached, scale, key, scales, *rest = ctx.saved
        gradient, gradient_log, grad_statistics, *into = ctx.live
        constants, x_dtype, bias_dtype, stacked_bias, forms, dtype = ctx.constants
        dy, rows = dy.to(dtype), GroupOffsets(m_splits, ends, group)
        weights, rest = tuple(rest[: constants.weights]), rest[constants.weights :]
        count = len(ctx.needs.parameters) - constants.weights if self.scale_bias else 0
        biases, rest = rest[:count], rest[count:]
        scaling = Scaling.of_backward(constants.config, scale, key, gradient, gradient_log, grad_statistics)
        groups = _groups(rows, constants, dtype)
        needs = (ctx.needs.input, any(ctx.needs.parameters[: constants.weights]))
        dx, dw = gradients(dy, weights, cached, tuple(into), groups, scaling, forms, rest, needs)
        db: tuple[Tensor | None, ...] = (None,) * (len(ctx.needs.parameters) - constants.weights)
        if any(ctx.needs.parameters[constants.weights :]):
            scaled = dy if scales is None else dy.float() * scales.float()[:, None]
            grouped = bias_rows_gradient(scaled, m_splits).to(bias_dtype)
            db = (grouped,) if stacked_bias else grouped.unbind(0)
        of_extra: tuple[Tensor | None, ...] = (None,)
        if scales is not None:
            bias = biases[0] if stacked_bias else torch.stack(biases)
            wanted = ctx.needs.extra_inputs[1]
            of_extra += ((dy.float() * rows.per_row(bias).float()).sum(-1).to(scales.dtype) if wanted else None,)
        return Gradients(None if dx is None else dx.to(x_dtype), (*dw, *db), of_extra)


def _groups(rows: GroupOffsets, constants: GroupedConstants, dtype: torch.dtype) -> Groups:
    return Groups(rows, row_alignment(constants.config.quantizers, rows.m_splits.device), dtype)


def _scaled_rows(rows: GroupOffsets, bias: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return the bias [G, N] of each row, times scales [T], in float32, if given: [T, N]."""
    found = rows.per_row(bias)
    if scales is None:
        return found
    if scales.shape != found.shape[:1]:
        raise ValueError(f"the scales of the bias have shape {tuple(scales.shape)}; allowed: {tuple(found.shape[:1])}")
    return found.float() * scales.float()[:, None]
