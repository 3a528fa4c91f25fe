"""What the constructors of layers share: how parameters are created, how their gradients are computed, a norm."""

from dataclasses import dataclass

import torch

from ..distributed.tensor_parallel import InitMethod


@dataclass(frozen=True)
class ParameterOptions:
    """dtype: of the parameters, None: torch's default; device: likewise; init_method: fills a weight in place, None:
    N(0, 0.023^2)."""

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    init_method: InitMethod | None = None


@dataclass(frozen=True)
class WeightGradients:
    """The options of `GemmModule` by its names: how the gradients of weights are computed."""

    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False


@dataclass(frozen=True)
class PrecedingNormOptions:
    """The norm ahead of a GEMM. kind: "LayerNorm" or "RMSNorm"; cast_order None: the kind's own; bias None: for
    LayerNorm; the others: as for `RMSNorm`."""

    kind: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False
    cast_order: str | None = None
    weight: bool = True
    bias: bool | None = None


DEFAULT_PARAMETERS = ParameterOptions()
IN_BACKWARD = WeightGradients()
DEFAULT_NORM = PrecedingNormOptions()
