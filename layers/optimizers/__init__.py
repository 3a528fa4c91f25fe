"""FusedAdamW: float32 masters, moments in few bits, primary weights requantized in the step.

`te.optimizers`, as Transformer Engine's scripts call it; it therefore offers the optimizers of `..te`, too. The
other files may import: `te_models.kernels`, `..quantizer`, `..tensor`.
"""

from ..te.optimizers.fused_adam import FusedAdam
from ..te.optimizers.fused_sgd import FusedSGD
from ..te.optimizers.multi_tensor import MultiTensorApply, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale
from .fused_adamw import FusedAdamW

__all__ = [
    "FusedAdam",
    "FusedAdamW",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
]
