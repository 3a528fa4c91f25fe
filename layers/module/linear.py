"""The dense layer."""

from torch import Tensor

from te_models.kernels.activation import Activation

from ..distributed.tensor_parallel import WHOLE, TensorParallelSplit
from ..gemm.autograd import linear_function
from ..gemm.prologue import Prologue
from ..gemm.registered import Boundary, check_boundary
from .options import DEFAULT_PARAMETERS, IN_BACKWARD, ParameterOptions, WeightGradients
from .parameters_split import ParametersSplit, SplitParameters
from .primary_weights import store_weights_as_asked


class Linear(SplitParameters):
    """`y = x w^T + b`, quantized under `autocast`: `te_models.layers.Linear` with options as values.

    weight: [out_features, in_features]; bias: [out_features], zero at first. split: how the weight is split over ranks,
    see `tensor_parallel`. return_bias (may be set later): return (y without bias, bias), and the caller adds it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parameters: ParameterOptions = DEFAULT_PARAMETERS,
        split: TensorParallelSplit = WHOLE,
        gradients: WeightGradients = IN_BACKWARD,
        parameters_split: ParametersSplit | None = None,
        name: str = "",
        boundary: Boundary = "kernel",
    ) -> None:
        super().__init__(1, name, gradients)
        self.in_features, self.out_features = self.split_features(split, in_features, out_features)
        self.boundary: Boundary = check_boundary(boundary, self.tp_size, gradients.delay_wgrad_compute)
        self.add_parameters(parameters_split, self.in_features, out_features, bias, parameters)
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        self.mark_parameters()

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        activation: Activation | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """x: [..., in_features] -> [..., out_features], in the compute dtype. is_first_microbatch: True quantizes the
        weight and caches the result, False uses what is cached, None quantizes without caching; True writes to a main
        gradient, see `GemmModule`. fp8_output: under a recipe return y as a quantized tensor, rowwise, in the
        format of the recipe's inputs; fp8_grad: the gradient of x is a quantized tensor in the format of its gradients,
        with the copies that their quantizer makes. Under DelayedScaling the two have different scales. ValueError for
        fp8_grad in compiled code. activation: x is its
        input, [..., 2 in_features] if it is gated; on an accelerator its result is quantized in the same pass."""
        prologue = None if activation is None else Prologue(activation)
        weight, own = (self.weight, self.bias) if self.parameters_split is None else self.joined_parameters()
        row = self.parallel_mode == "row"
        call = self.gemm_call(is_first_microbatch, 0)
        if fp8_grad:
            x = self.with_quantized_gradient(x, call)
        if self.parallel_mode == "column":
            x, prologue = self.whole_rows(x if prologue is None else prologue.run(x)), None
        bias = None if self.return_bias else own
        y = linear_function(x, weight, None if row else bias, call, prologue, self.boundary)
        y = self.summed(y, bias) if row else y
        if fp8_output:
            y = self.output(y)
        if not self.return_bias:
            return y
        return self.results(y, self.for_own_rows(own) if row and own is not None else own)

    def extra_repr(self) -> str:
        split = "" if self.parameters_split is None else f", parameters_split={self.parameters_split}"
        return f"{self.in_features}, {self.out_features}, bias={self.joined('bias') is not None}{split}"
