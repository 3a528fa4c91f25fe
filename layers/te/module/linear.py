"""The dense layer with Transformer Engine's arguments."""

import torch
import torch.distributed as dist

from ...distributed.tensor_parallel import InitMethod, ParallelMode, TensorParallelSplit
from ...gemm.registered import Boundary
from ...module import linear
from ...module.options import ParameterOptions, WeightGradients
from ...module.parameters_split import ParametersSplit
from ..arguments import takes_parallel_options
from ..stands_for import StandsFor
from ..state import TEState


class Linear(TEState, linear.Linear, metaclass=StandsFor):
    """`y = x w^T + b`, quantized under `autocast`. Transformer Engine: `te.pytorch.Linear`.

    weight: [out_features, in_features]; bias: [out_features]. params_dtype: dtype of the parameters (None: torch's
    default); init_method: fills the weight in place (None: N(0, 0.023^2)); the bias starts at zero. parallel_mode: how
    the weight is split over the ranks of tp_group, see `tensor_parallel`; in_features and out_features are the unsplit
    sizes, the attributes of that name this rank's. return_bias: return (y without bias, bias): the caller adds it.
    boundary: what the compiler sees of the layer, with the same numbers: "kernel" every quantization and GEMM, and it
    fuses them; "layer" one operation forward and one backward: small graphs without fusion (docs/compile.md).
    parameters_split: several parameters in place of one, see `SplitParameters`. The other options: see `GemmModule`;
    name: see `QuantizedModule`.
    """

    CORE = linear.Linear

    @takes_parallel_options
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        parameters_split: ParametersSplit | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str = "",
        boundary: Boundary = "kernel",
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            parameters=ParameterOptions(params_dtype, device, init_method),
            split=TensorParallelSplit(parallel_mode, tp_group, tp_size, sequence_parallel),
            gradients=WeightGradients(fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input),
            parameters_split=parameters_split,
            name=name,
            boundary=boundary,
        )
        self.return_bias = return_bias
