"""The dense GEMM, alone and with a bias, and the quantization of its input as a separate operation."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.kernels.without_autocast import autocast_dtype, require_floating

from ....distributed.tensor_parallel import (
    InitMethod,
    ParallelMode,
    TensorParallelModule,
    TensorParallelSplit,
    split_group,
)
from ....gemm.plain import largest
from ....gemm.product import scaled_values
from ....gemm.prologue import input_quantizer, readable_as_input
from ....gemm.scaling import GemmConfig, Scaling
from ....gemm.three_gemms import ONE_MATRIX, Forms, fprop, gradients
from ....module.base import GemmModule, QuantizedModule
from ....module.options import WeightGradients
from ....module.primary_weights import default_init_method, empty_parameter, store_weights_as_asked
from ....quantizer import Quantizer
from ....quantizer.delayed import update_amax_
from ....quantizer.state import AnyQuantizer, QuantizerState, value_of, with_gradient_state, with_state
from ....recipe.base import HIGH_PRECISION
from ....tensor.storage import QuantizedStorage, storage_of
from ...arguments import OF_OPERATIONS, THEIR_NAMES, takes_also, takes_at_default
from ...state import TEState
from ..call import Computed, Gradients, Input, OperationArguments, OperationCall, OperationContext, QuantizedRows
from ..operation import BasicOperation, FusibleOperation
from .collectives import AllReduce, ReduceScatter
from .elementwise import Bias

_INPUT_ITSELF = ("plain", "original")  # kinds of `SavedForm` in which the input is saved as it is


class LinearConstants(NamedTuple):
    """What a linear operation computes with. dtype: of its GEMMs where `torch.amp.autocast` decides, else None."""

    config: GemmConfig
    dtype: torch.dtype | None


class QuantizeConstants(NamedTuple):
    """What a quantization makes of its input and of its gradient; None: nothing."""

    input: Quantizer | None
    grad_output: Quantizer | None


class LinearNotes(NamedTuple):
    """How the backward pass reads what was saved. dtype: of the GEMMs; x_dtype, x_shape: of the input."""

    config: GemmConfig
    forms: Forms
    dtype: torch.dtype
    x_dtype: torch.dtype
    x_shape: torch.Size


class BasicLinear(TEState, TensorParallelModule, GemmModule, BasicOperation):
    """`y = x w^T`, quantized under `autocast`. Transformer Engine: `te.ops.BasicLinear`.

    weight: [out_features, in_features]. Takes quantized inputs. tensor_parallel_mode ("column", "row"),
    tensor_parallel_group (None: all ranks), sequence_parallel: split as `parallel_mode` of te_models.layers.Linear; the
    sizes given are the unsplit ones, the attributes this rank's. rng_state_tracker_function: returns a tracker in whose
    `fork()` the weight is initialised. The other options: see `Linear` and `GemmModule`. ValueError for
    userbuffers_options: collectives are torch.distributed's.
    """

    TAKES_QUANTIZED = True
    communicates = True
    """Whether a row-parallel operation sums its result over the ranks; in `Linear` an operation after the bias does."""

    @takes_also(**THEIR_NAMES)
    @takes_at_default(**OF_OPERATIONS)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str = "",
        tensor_parallel_mode: ParallelMode | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
    ) -> None:
        gradients = WeightGradients(fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input)
        super().__init__(1, name, gradients)
        group = split_group(tensor_parallel_mode, tensor_parallel_group)
        split = TensorParallelSplit(tensor_parallel_mode, group, 1, sequence_parallel)
        self.in_features, self.out_features = self.split_features(split, in_features, out_features)
        self.init_method = init_method or default_init_method
        self.rng_state_tracker_function = rng_state_tracker_function
        new: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        self.weight = empty_parameter(self.out_features, self.in_features, **new)
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        self.mark_part(self.weight, self.split_dim())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weight again."""
        tracker = self.rng_state_tracker_function
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            self.fill_part(self.weight, self.init_method, self.split_dim())

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        cached = self.cached_weight((self.weight,), None, 0)
        quantizers, options = self.gemm_quantizers(), self.gemm_options(self.weight)
        recorded = None
        if self.calibrating():
            self.calibrate("weight", largest(self.weight), 0)
            recorded = self.calibration_amax("input", 0)
        quantizers = quantizers or HIGH_PRECISION
        main_grad = None if options.wgrad is None else options.wgrad.main_grad
        tensors = (cached, main_grad, recorded, *self.live_state(quantizers))
        return OperationArguments(
            (self.weight,), tensors, LinearConstants(GemmConfig(quantizers, options), autocast_dtype(device_type))
        )

    def input_quantizer(self, call: OperationCall) -> AnyQuantizer | None:
        if self._gathers():
            return None
        (weight,), (_, _, _, *tensors) = call.parameters, call.tensors
        return input_quantizer(
            Scaling(call.constants.config, QuantizerState(*tensors)), call.needs.parameters[0], weight.device
        )

    def op_forward_compute(self, x: Input, call: OperationCall) -> Computed:
        return self.compute_with_bias(x, None, call)

    def compute_with_bias(self, x: Input, bias: Tensor | None, call: OperationCall) -> Computed:
        """Return the forward pass with a bias [out_features] in the epilogue of the GEMM."""
        (weight,), (cached, _, recorded, *state) = call.parameters, call.tensors
        config: GemmConfig = call.constants.config
        require_floating(x.dtype)
        dtype = call.constants.dtype or x.dtype
        rows: Tensor | QuantizedStorage
        needs = call.needs.input, call.needs.parameters[0]
        if self._gathers():
            x = self.whole_rows(x.dequantize() if isinstance(x, QuantizedRows) else x)
        if isinstance(x, QuantizedRows) and not readable_as_input(x.storage.quantizer, config.quantizers, needs[1]):
            x = x.dequantize()
        if isinstance(x, QuantizedRows):
            rows = x.storage
        else:
            rows = x.to(dtype).reshape(-1, x.shape[-1])
            if recorded is not None:
                update_amax_(recorded, largest(rows))
        scaling = Scaling(config, QuantizerState(*state))
        y, forms, tensors = fprop(rows, (weight,), bias, cached, ONE_MATRIX, scaling, dtype, needs)
        notes = LinearNotes(config, forms, dtype, x.dtype, x.shape)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return Computed(self.summed(y, None) if self._sums() else y, tensors, notes=notes)

    def _gathers(self) -> bool:
        """Whether the input is this rank's part of the rows."""
        return self.parallel_mode == "column" and self.sequence_parallel

    def _sums(self) -> bool:
        """Whether this operation sums its result over the ranks."""
        return self.parallel_mode == "row" and self.communicates

    def op_forward_save_ctx(self, ctx: OperationContext, x: Input, computed: Computed, call: OperationCall) -> None:
        (weight,), (cached, main_grad, _, *tensors) = call.parameters, call.tensors
        state, notes = QuantizerState(*tensors), computed.notes
        saved: tuple[Any, ...] = computed.saved
        very = notes.forms.x.kind in _INPUT_ITSELF and isinstance(x, Tensor) and x.dtype == notes.dtype
        if very and not self._gathers():
            saved = (x, *saved[1:])  # the very input, not a matrix made of it: it has second derivatives
        ctx.save_for_backward(weight, cached, state.scale, state.key, *saved)
        ctx.save_live(main_grad, state.gradient, state.gradient_log, state.grad_statistics)
        ctx.constants = notes

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        weight, cached, scale, key, *rest = ctx.saved
        tensors = list(rest)  # which torch 2.11 traces as a tuple
        main_grad, gradient, gradient_log, grad_statistics = ctx.live
        notes: LinearNotes = ctx.constants
        scaling = Scaling.of_backward(notes.config, scale, key, gradient, gradient_log, grad_statistics)
        if notes.forms.x.kind in _INPUT_ITSELF:
            tensors[0] = tensors[0].reshape(-1, tensors[0].shape[-1])
        if self._sums():
            dy = self.summed_gradient(dy)
        rows = dy.to(notes.dtype).reshape(-1, dy.shape[-1])
        into, needs = () if main_grad is None else (main_grad,), (ctx.needs.input, ctx.needs.parameters[0])
        dx, dw = gradients(rows, (weight,), cached, into, ONE_MATRIX, scaling, notes.forms, tensors, needs)
        if dx is not None:
            dx = dx.to(notes.x_dtype).view(notes.x_shape)
            dx = self.rows_gradient(dx) if self.parallel_mode == "column" else dx
        return Gradients(dx, dw)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class Quantize(TEState, QuantizedModule, BasicOperation):
    """Quantize [..., C] as the input of a GEMM under the active recipe (forward), and the gradient as the gradient of a
    GEMM's output (backward); without a recipe, calibrate at most.

    The next operation takes the quantized data if it can; at the end of a group the result is a quantized tensor, and
    has to be a matrix. The gradient is handed on as what its rowwise quantization stands for, in its own dtype. Under
    `torch.compile` let the operation that uses the data follow in the same `Sequential`: a quantized tensor can enter
    or leave a graph, but its gradient cannot, and the compiler does not see the quantizer of one that was made between
    two groups of the same graph. Transformer Engine: `te.ops.Quantize`.
    """

    TAKES_QUANTIZED = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward

    def weight_names(self) -> tuple[str, ...]:
        return ()

    def fuser_arguments(self, device_type: str) -> OperationArguments:
        quantizers = self.gemm_quantizers()
        live = self.live_state(quantizers or HIGH_PRECISION)
        recorded = self.calibration_amax("input", 0) if self.calibrating() else None
        constants = QuantizeConstants(None, None)
        if quantizers is not None:
            of_x = quantizers.input if self.quantize_forward else None
            constants = QuantizeConstants(of_x, quantizers.grad_output if self.quantize_backward else None)
        return OperationArguments((), (recorded, *live), constants)

    def op_forward_compute(self, x: Input, call: OperationCall) -> Computed:
        recorded, *tensors = call.tensors
        wanted = call.constants.input
        if recorded is not None and isinstance(x, Tensor):
            update_amax_(recorded, largest(x.reshape(-1, x.shape[-1])))
        if wanted is None or isinstance(x, QuantizedRows):
            return Computed(x)
        state = QuantizerState(*tensors)
        quantizer = with_state(wanted, state.scale, state.amax, "input", 0)
        value = value_of(quantizer)
        rows = x.reshape(-1, x.shape[-1])
        storage = storage_of(quantizer.quantize_fields(rows), value, rows.shape, x.dtype)
        return Computed(QuantizedRows(storage, x.shape))

    def op_forward_save_ctx(self, ctx: OperationContext, x: Input, computed: Computed, call: OperationCall) -> None:
        ctx.constants = call.constants.grad_output
        if ctx.constants is not None:
            _, *tensors = call.tensors
            state = QuantizerState(*tensors)
            ctx.save_for_backward(state.key)
            ctx.save_live(state.gradient, state.gradient_log)

    def op_backward(self, ctx: OperationContext, dy: Tensor, extra_gradients: tuple[Tensor, ...]) -> Gradients:
        if ctx.constants is None:
            return Gradients(dy)
        (key,), (gradient, gradient_log) = ctx.saved, ctx.live
        state = QuantizerState(gradient=gradient, gradient_log=gradient_log)
        quantizer = with_gradient_state(ctx.constants, state, lambda: largest(dy), 0)
        operand = quantizer.rounded(dy.reshape(-1, dy.shape[-1]), "rowwise", dy.dtype, key)
        return Gradients(scaled_values(operand, dy.dtype).view(dy.shape))

    def extra_repr(self) -> str:
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}"


class Linear(FusibleOperation):
    """`y = x w^T + b`: a BasicLinear `linear` and a Bias; a group fuses them. Transformer Engine: `te.ops.Linear`.

    weight, bias: their parameters, bias None without one. In a state dict they are `linear.weight` and `bias.bias`;
    Transformer Engine's `basic_ops.0.weight` and `basic_ops.1.bias` are loaded, too. The keyword arguments: see
    `BasicLinear`. Split "row", every rank has a separate bias [out_features], and their sum is added to the result, as
    in Transformer Engine; split "column", its part of the bias.
    """

    @takes_also(**THEIR_NAMES)
    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.linear = BasicLinear(in_features, out_features, **options)
        new = {name: options[name] for name in ("params_dtype", "device") if name in options}
        if self.linear.parallel_mode == "column":
            new |= {"tensor_parallel": True, "tensor_parallel_group": self.linear.tp_group}
        # past `add_module`: the attribute of this name is the parameter
        self._modules["bias"] = Bias(out_features, **new) if bias else None
        self.reduction: BasicOperation | None = None
        if self.linear.parallel_mode == "row":
            self.linear.communicates = False
            reduction = ReduceScatter if self.linear.sequence_parallel else AllReduce
            self.reduction = reduction(self.linear.tp_group)

    @property
    def weight(self) -> nn.Parameter:
        return self.linear.weight

    @property
    def bias(self) -> nn.Parameter | None:
        added = self._modules["bias"]
        return None if added is None else added.bias  # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> None:
        """Exchange the weight or the bias where a parameter is assigned. ValueError for a bias of an operation without
        one."""
        if name not in ("weight", "bias") or not isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
        elif name == "bias" and self.bias is None:
            raise ValueError("this ops.Linear was built with bias=False and has no bias to exchange")
        else:
            setattr(self.linear if name == "weight" else self._modules["bias"], name, value)

    def basic_operations(self) -> tuple[BasicOperation, ...]:
        added = self._modules["bias"]
        assert added is None or isinstance(added, BasicOperation)
        return tuple(operation for operation in (self.linear, added, self.reduction) if operation is not None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for index, own in enumerate(("linear", "bias")):
            theirs = f"{prefix}basic_ops.{index}."
            for key in [key for key in state_dict if key.startswith(theirs)]:
                state_dict[f"{prefix}{own}.{key.removeprefix(theirs)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)
