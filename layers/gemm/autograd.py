"""The one autograd function behind every layer with GEMMs, dense or grouped, and the dense layer, `linear_function`.

The formula is Python around kernels on tensors, not one opaque operation per layer: the compiler sees every step. On an
accelerator it fuses the quantizations with what is around them; in a CPU graph the operands of block, MXFP8 and NVFP4
scaling are one operation each (`kernels/quantize/cpu`). `three_gemms` holds the GEMMs. Live state comes in as
tensors; nothing is hidden in objects.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.activation import Activation
from te_models.kernels.gemm.dense import linear as dense
from te_models.kernels.norm import Norm
from te_models.kernels.permute import Permutation, unpermute
from te_models.kernels.torch_versions import TORCH_2_11, fix_width, own_result
from te_models.kernels.without_autocast import autocast_dtype_of, compute_dtype

from ..quantizer.group_offsets import GroupOffsets
from ..quantizer.state import QuantizerState
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from .plain import calibrate, stored_linear
from .product import bias_gradient, quantized_gemms
from .prologue import Prologue, fused_output, fused_storage, input_quantizer
from .quantized_rows import permuted
from .registered import Boundary, as_one_operation
from .rows import AlignedGroups, Groups
from .scaling import GemmCall, GemmConfig, GemmOptions, Scaling
from .three_gemms import ONE_MATRIX, OneMatrix, fprop, gradients
from .wgrad import main_grads


class Arguments(NamedTuple):
    """x: [T, K] in `dtype`, the GEMMs' dtype, or quantized; with a prologue its input [..., H]; with a permutation:
    tokens [tokens, K] of any dtype, from which the rows are made. bias: [N], None in a layer of groups; cached: the
    weights quantized in an earlier micro-batch; scale to gradient_log: of QuantizerState; quantizers to index: of
    GemmConfig. needs_x, needs_weight: whether the gradients of x or a norm's parameter, and of a weight, are wanted.
    function to norm_bias: of Prologue, with dtype for a result; slot_of_row to padding_rows: of Permutation; m_splits
    to group: of GroupOffsets; align: of `Groups`; aligned: whether they are `AlignedGroups`. Behind these come `count`
    weights, one [N, K] or [G, N, K], or G of [N, K], plain or quantized, and the main gradients, if there are any."""

    x: Any
    bias: Any
    cached: Any
    scale: Any
    amax: Any
    gradient: Any
    statistics: Any
    grad_statistics: Any
    key: Any
    gradient_log: Any
    quantizers: GemmQuantizers
    options: GemmOptions
    index: int | None
    dtype: torch.dtype
    needs_x: bool
    needs_weight: bool
    function: Norm | Activation | None = None
    norm_weight: Any = None
    norm_bias: Any = None
    slot_of_row: Any = None
    row_of_slot: Any = None
    padding_rows: Any = None
    m_splits: Any = None
    ends: Any = None
    group: Any = None
    align: int = 1
    aligned: bool = False
    count: int = 1


_COUNT = len(Arguments._fields)
_SAVED_AS_THEY_ARE = slice(Arguments._fields.index("norm_weight"), Arguments._fields.index("group") + 1)
_NO_GRADIENTS: Any = Arguments(*(None,) * _COUNT)  # type: ignore[arg-type]


class _Saved(NamedTuple):
    """What autograd saves in front of the statistics of the prologue, the weights, and what fprop left for the other
    GEMMs. x: of the prologue."""

    x: Any
    norm_weight: Any
    norm_bias: Any
    slot_of_row: Any
    row_of_slot: Any
    padding_rows: Any
    m_splits: Any
    ends: Any
    group: Any
    cached: Any
    scale: Any
    key: Any


def _rows(of: Arguments | _Saved, align: int, aligned: bool, dtype: torch.dtype) -> OneMatrix:
    offsets = GroupOffsets(of.m_splits, of.ends, of.group)
    return AlignedGroups(offsets) if aligned else Groups(offsets, align, dtype)


def _permutation(of: Arguments | _Saved) -> Permutation:
    """Rebuild the permutation; the counts (nobody reads them here) are the splits."""
    return Permutation(of.slot_of_row, of.row_of_slot, of.m_splits, of.m_splits, of.padding_rows)


class Gemms(torch.autograd.Function):
    """The GEMMs of a layer, with or without a prologue whose result is quantized as it is made, and with or without a
    permutation that is quantized in the same pass. Arguments: `Arguments`, weights, main gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        a = Arguments(*arguments[:_COUNT])
        weights = arguments[_COUNT : _COUNT + a.count]
        state = QuantizerState(a.scale, a.amax, a.gradient, a.statistics, a.grad_statistics, a.key)
        scaling = Scaling(GemmConfig(a.quantizers, a.options, a.index), state)
        x, before, statistics = a.x, None, ()
        if a.function is not None:
            quantizer = input_quantizer(scaling, a.needs_weight, x.device)
            output = fused_output(quantizer, a.dtype, a.dtype)
            assert quantizer is not None and output is not None, "the caller has asked"
            prologue = Prologue(a.function, a.norm_weight, a.norm_bias)
            fields, statistics, ctx.shape = prologue.run_quantized(x, *output)
            x = fused_storage(quantizer, fields, ctx.shape, a.dtype)
            before = a.function.stored(a.x) if isinstance(a.function, Activation) else a.x
        elif a.slot_of_row is not None:
            x = permuted(x, _permutation(a), a.quantizers, a.dtype)
        rows = ONE_MATRIX if a.m_splits is None else _rows(a, a.align, a.aligned, a.dtype)
        needs = (a.needs_x, a.needs_weight)
        y, ctx.forms, tensors = fprop(x, weights, a.bias, a.cached, rows, scaling, a.dtype, needs)
        saved = _Saved(before, *a[_SAVED_AS_THEY_ARE], a.cached, a.scale, a.key)  # pyright: ignore[reportCallIssue]
        ctx.save_for_backward(*saved, *statistics, *weights, *tensors)
        # not saved: backward writes to them, also between the forward and the backward pass of another call
        ctx.main_grads, ctx.grad_statistics = arguments[_COUNT + a.count :], a.grad_statistics
        ctx.gradient, ctx.gradient_log = a.gradient, a.gradient_log
        ctx.function, ctx.dtype, ctx.statistics = a.function, a.dtype, len(statistics)
        ctx.config, ctx.align, ctx.aligned, ctx.count = (a.quantizers, a.options, a.index), a.align, a.aligned, a.count
        ctx.x_dtype, ctx.bias_dtype = a.x.dtype, None if a.bias is None else a.bias.dtype
        return own_result(y) if TORCH_2_11 else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # read once: a checkpoint of another library recomputes for one reading
        tensors = ctx.saved_tensors
        fixed = len(_Saved._fields)
        s, statistics = _Saved(*tensors[:fixed]), tuple(tensors[fixed : fixed + ctx.statistics])
        fixed += ctx.statistics
        weights, rest = tuple(tensors[fixed : fixed + ctx.count]), list(tensors[fixed + ctx.count :])
        wanted = Arguments(*ctx.needs_input_grad[:_COUNT])
        needs = (
            bool(wanted.x or wanted.norm_weight or wanted.norm_bias),
            any(ctx.needs_input_grad[_COUNT : _COUNT + ctx.count]),
        )
        config = GemmConfig(*ctx.config)
        scaling = Scaling.of_backward(config, s.scale, s.key, ctx.gradient, ctx.gradient_log, ctx.grad_statistics)
        rows = ONE_MATRIX if s.m_splits is None else _rows(s, ctx.align, ctx.aligned, ctx.dtype)
        dx, dw = gradients(dy, weights, s.cached, ctx.main_grads, rows, scaling, ctx.forms, rest, needs)
        dw_norm = db_norm = None
        if dx is not None and ctx.function is not None:
            prologue = Prologue(ctx.function, s.norm_weight, s.norm_bias)
            x = ctx.function.restored(s.x, ctx.dtype) if isinstance(ctx.function, Activation) else s.x
            needs_norm = (wanted.norm_weight, wanted.norm_bias)
            dx, dw_norm, db_norm = prologue.gradients(dx.view(ctx.shape), x, statistics, needs_norm)
        elif dx is not None and s.slot_of_row is not None:
            dx = unpermute(dx, _permutation(s), None, dtype=ctx.x_dtype)
        db = bias_gradient(dy, ctx.bias_dtype) if wanted.bias else None
        found = _NO_GRADIENTS._replace(x=dx if wanted.x else None, bias=db, norm_weight=dw_norm, norm_bias=db_norm)
        return *found, *dw, *(None,) * len(ctx.main_grads)


def linear_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: GemmCall | None,
    prologue: Prologue | None = None,
    boundary: Boundary = "kernel",
) -> Tensor:
    """Return `x @ weight^T + bias` in the compute dtype.

    x: [..., in], with a prologue its input; weight: [out, in], plain or quantized; bias: [out] or None; call: what the
    module computes it with, None for plain high precision; boundary: "layer" makes one operation of it and one of its
    backward pass, with the same numbers; a prologue runs in front of that.
    """
    fused = None
    if prologue is not None and call is not None and call.config is not None and boundary == "kernel":
        fused = _fused_dtype(x, weight, call, prologue)
    if prologue is not None and fused is None:
        x, prologue = prologue.run(x), None
    # `compute_dtype`, without the call in the plain case
    plain = x.is_cpu and x.is_floating_point() and not torch.is_autocast_enabled("cpu")
    dtype = (x.dtype if plain else compute_dtype(x)) if fused is None else fused
    if prologue is None:
        x = x.to(dtype)
    if call is not None and call.amaxes is not None:
        calibrate(x, weight, call.amaxes)
    if boundary == "layer":
        return as_one_operation(x, weight, bias, call)
    if call is None or call.config is None:
        if isinstance(weight, QuantizedTensor):
            return stored_linear(x, weight, bias)
        return dense(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    if TORCH_2_11:
        fix_width(x)
    # asked outside of the autograd function: inside, a parameter under no_grad would seem to need a gradient, too, and
    # tensors would be saved that no backward pass reads
    grad, needs_x = torch.is_grad_enabled(), x.requires_grad
    if prologue is not None and not needs_x:
        needs_x = any(p is not None and p.requires_grad for p in prologue[1:])
    wgrad = call.config.options.wgrad
    arguments = Arguments(
        x.reshape(-1, x.shape[-1]) if prologue is None else x,
        bias,
        call.cached,
        *call.state,
        *call.config,
        dtype,
        grad and needs_x,
        grad and weight.requires_grad,
        *(prologue or ()),  # pyright: ignore[reportArgumentType]
    )
    y = Gemms.apply(*arguments, weight, *(() if wgrad is None else main_grads(wgrad)))
    return y.view(*x.shape[:-1], weight.shape[0])


def _fused_dtype(x: Tensor, weight: Tensor, call: GemmCall, prologue: Prologue) -> torch.dtype | None:
    """Return the dtype of the GEMM whose input the prologue quantizes; None where they are two functions: in high
    precision, on a CPU, and where a recipe wants the high-precision result."""
    assert call.config is not None, "the caller has asked"
    if call.config.quantizers is HIGH_PRECISION or not quantized_gemms(x.device):
        return None
    dtype = prologue.dtype(x)
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    quantizer = input_quantizer(Scaling(call.config, call.state), needs_wgrad, x.device)
    fused = fused_output(quantizer, dtype, autocast_dtype_of(x) or dtype)
    return None if fused is None else dtype
