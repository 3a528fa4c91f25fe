"""A norm and a dense layer as one module, with Transformer Engine's arguments."""

from typing import Literal

import torch
import torch.distributed as dist

from ...distributed.tensor_parallel import InitMethod, TensorParallelSplit
from ...module import layernorm_linear
from ...module.options import ParameterOptions, PrecedingNormOptions, WeightGradients
from ...module.parameters_split import ParametersSplit
from ..arguments import takes_at_default, takes_parallel_options
from ..stands_for import StandsFor
from ..state import TEState


class LayerNormLinear(TEState, layernorm_linear.LayerNormLinear, metaclass=StandsFor):
    """`y = norm(x) w^T + b`. Transformer Engine: `te.pytorch.LayerNormLinear`.

    Parameters: layer_norm_weight [in] (unless norm_weight is False), layer_norm_bias [in] (with norm_bias, by default
    for LayerNorm), weight [out, in], bias [out]. cast_order None: each norm's own default. parallel_mode "column" and
    its companions: as for `Linear`; under sequence parallelism each rank normalises its own rows. return_bias,
    parameters_split: as for `Linear`; return_layernorm_output: also return norm(x), after y and a returned bias. The
    other options: see `GemmModule`. Raises ValueError for parallel_mode "row": a norm needs whole rows.
    """

    CORE = layernorm_linear.LayerNormLinear

    @takes_parallel_options
    @takes_at_default(return_layernorm_output_gathered=False)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        norm_weight: bool = True,
        norm_bias: bool | None = None,
        zero_centered_gamma: bool = False,
        cast_order: str | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["column"] | None = None,
        parameters_split: ParametersSplit | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            norm=PrecedingNormOptions(normalization, eps, zero_centered_gamma, cast_order, norm_weight, norm_bias),
            parameters=ParameterOptions(params_dtype, device, init_method),
            split=TensorParallelSplit(parallel_mode, tp_group, tp_size, sequence_parallel),
            gradients=WeightGradients(fuse_wgrad_accumulation, delay_wgrad_compute),
            parameters_split=parameters_split,
            name=name,
        )
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
