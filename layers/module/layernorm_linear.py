"""A norm followed by a dense layer, as one module: the pair that a fused kernel can serve."""

import torch
from torch import Tensor

from te_models.suggestions import shown

from ..distributed.tensor_parallel import WHOLE, TensorParallelSplit
from ..gemm.autograd import linear_function
from .norm import PrecedingNorm
from .options import (
    DEFAULT_NORM,
    DEFAULT_PARAMETERS,
    IN_BACKWARD,
    ParameterOptions,
    PrecedingNormOptions,
    WeightGradients,
)
from .parameters_split import ParametersSplit, SplitParameters
from .primary_weights import materialising, store_weights_as_asked


class LayerNormLinear(PrecedingNorm, SplitParameters):
    """`y = norm(x) w^T + b`.

    Parameters: layer_norm_weight [in] and layer_norm_bias [in] as `norm` says, weight [out, in], bias [out]. split:
    whole or by column, as for `Linear`; under sequence parallelism each rank normalises its own rows. The other options
    and return_bias: as for `Linear`; return_layernorm_output (may be set later): also return norm(x), after y and a
    returned bias. Raises ValueError for a split by row: a norm needs whole rows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: PrecedingNormOptions = DEFAULT_NORM,
        parameters: ParameterOptions = DEFAULT_PARAMETERS,
        split: TensorParallelSplit = WHOLE,
        gradients: WeightGradients = IN_BACKWARD,
        parameters_split: ParametersSplit | None = None,
        name: str = "",
    ) -> None:
        super().__init__(1, name, gradients)
        if split.mode not in (None, "column"):
            raise ValueError(f"parallel_mode is {shown(split.mode)}; allowed: None, 'column' (a norm needs whole rows)")
        self.in_features, self.out_features = self.split_features(split, in_features, out_features)
        self.add_norm(in_features, norm, parameters)
        self.add_parameters(parameters_split, in_features, out_features, bias, parameters)
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        self.mark_parameters()

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        self.reset_norm()
        super().reset_parameters()

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """x: [..., in_features] -> [..., out_features], in the compute dtype. The arguments: as for `Linear`."""
        found = self.forward_with_norm(x, is_first_microbatch, self.return_layernorm_output, fp8_grad)[0]
        if not fp8_output:
            return found
        y, *others = found if isinstance(found, tuple) else (found,)
        assert y is not None, "only a bias or a norm is left out"
        y = self.output(y)
        return (y, *others) if others else y

    def forward_with_norm(
        self, x: Tensor, is_first_microbatch: bool | None = None, wanted: bool = True, fp8_grad: bool = False
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Tensor | None]:
        """Return (what `forward` returns, norm(x) [..., in_features], or None where it is not `wanted` and the norm may
        be fused with the quantization)."""
        weight, own = (self.weight, self.bias) if self.parameters_split is None else self.joined_parameters()
        call = self.gemm_call(is_first_microbatch, 0)
        bias, normed = None if self.return_bias else own, None
        if fp8_grad:
            x = self.with_quantized_gradient(x, call)
        if self.parallel_mode is None and not wanted:
            y = linear_function(x, weight, bias, call, self.prologue())
        else:
            normed = self.normed(x, None if self.parallel_mode is None else self.for_own_rows)
            y = linear_function(normed if self.parallel_mode is None else self.whole_rows(normed), weight, bias, call)
        if not (self.return_bias or self.return_layernorm_output):
            return y, normed
        return self.results(y, own, normed), normed  # this rank's part of the bias, beside whole rows

    def extra_repr(self) -> str:
        return f"{self.normalization}, {self.in_features}, {self.out_features}, bias={self.joined('bias') is not None}"
