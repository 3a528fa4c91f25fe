"""The layer of experts with Transformer Engine's arguments."""

import torch
import torch.distributed as dist

from ...distributed.tensor_parallel import InitMethod, ParallelMode, TensorParallelSplit
from ...module import grouped_linear
from ...module.options import ParameterOptions, WeightGradients
from ..arguments import takes_at_default, takes_parallel_options
from ..stands_for import StandsFor
from ..state import TEState


class GroupedLinear(TEState, grouped_linear.GroupedLinear, metaclass=StandsFor):
    """`y[g] = x[g] w[g]^T + b[g]` for `num_gemms` groups of rows. Transformer Engine: `te.pytorch.GroupedLinear`.

    single_grouped_weight: True holds one parameter `weight` [num_gemms, out, in]; False holds `weight0`, `weight1`,
    ..., Transformer Engine's per-GEMM layout. single_grouped_bias: likewise `bias` [num_gemms, out], or `bias0`, ...;
    None: as the weight. These are layouts of the same layer: `load_state_dict` accepts either, quantized or not,
    without dequantizing. The grouped one is fast; the other is stacked on each call.
    parallel_mode: as for `Linear`, for every member alike; the layer does not itself communicate: gather before a
    column layer, sum after a row layer, once for all groups. The bias of a row layer belongs after that sum: the caller
    adds it with `with_bias`.
    The other options: see `GemmModule`; in the per-GEMM layout every weight has its separate `main_grad`.

    return_bias: return (y without bias, a list of the bias of each GEMM, None without any): the caller adds them.

    forward: x [T, in], rows sorted by expert; m_splits [num_gemms] integer, rows of each -> [T, out]. Raises ValueError
    for num_gemms below 1 and for m_splits of another shape or dtype, below 0, or of more rows than there are.
    """

    CORE = grouped_linear.GroupedLinear

    @takes_parallel_options
    @takes_at_default(sequence_parallel=False)
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool | None = None,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            parameters=ParameterOptions(params_dtype, device, init_method),
            split=TensorParallelSplit(parallel_mode, tp_group, tp_size),
            gradients=WeightGradients(fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input),
            name=name,
        )
        self.return_bias = return_bias
