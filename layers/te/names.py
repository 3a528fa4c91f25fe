"""Transformer Engine's names that are others here: a few that every script has, and where to find the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..module.autocast import autocast, quantized_model_init
from ..recipe.base import Recipe
from .arguments import takes_at_default

if TYPE_CHECKING:
    import torch.distributed as dist


@takes_at_default(_graph=False)
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> autocast:
    """Return `autocast(enabled, calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)`."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """Return `quantized_model_init(enabled, recipe, preserve_high_precision_init_val)`."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True, with return_reason (True, ""): every recipe runs on every device."""
    return (True, "") if return_reason else True


is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = _available
is_bf16_available = _available

_INSTEAD = {
    "CPLoadBalancingStrategy": "attention is not split over ranks along the sequence",
    "CudaRNGStatesTracker": "split weights start as parts of the unsplit one's, and ranks are seeded apart for dropout",
    "DelayedScalingRequest": "the recipe DelayedScaling is for all tensors of a layer",
    "Float8BlockwiseQTensor": "it is Float8BlockwiseTensor",
    "Float8BlockwiseQTensorStorage": "it is Float8BlockwiseTensorStorage",
    "FusedMLAQUpProjFunction": "te_models has latent attention in its models",
    "FusedMLAQUpProjRopeQuant": "te_models has latent attention in its models",
    "GatedDeltaNet2Attention": "attention is softmax attention",
    "GatedDeltaNetAttention": "attention is softmax attention",
    "GatedDeltaProductAttention": "attention is softmax attention",
    "HybridQuantizedTensor": "it is HybridTensor",
    "HybridQuantizedTensorStorage": "it is HybridTensorStorage",
    "InferenceParams": "te_models.GPTModel generates with te_models.KVCache",
    "MMParams": "it is te_models.layers.recipe.MMParams",
    "ManualOffloadSynchronizer": "use torch.autograd.graph.save_on_cpu",
    "QParams": "it is te_models.layers.recipe.QParams",
    "QuantizedTensorStorage": "it is QuantizedStorage",
    "QuantizerRequest": "a CustomRecipe's factory returns quantizers without state",
    "SplitAlongDim": "use torch.split",
    "UserBufferQuantizationMode": "collectives are torch.distributed's, without user buffers",
    "common": "te_models.layers.recipe has what is in transformer_engine.common.recipe",
    "deinterleave_glu_tensor": "operations take glu_interleave_size; elsewhere the halves are blocks, see torch.chunk",
    "destroy_ub": "collectives are torch.distributed's, without user buffers",
    "distributed": "checkpoint is here",
    "get_cpu_offload_context": "use torch.autograd.graph.save_on_cpu",
    "get_cudnn_version": "use torch.backends.cudnn.version",
    "get_default_fp8_recipe": "it is Float8CurrentScaling()",
    "get_default_recipe": "it is Float8CurrentScaling()",
    "get_device_compute_capability": "use torch.cuda.get_device_capability",
    "initialize_ub": "collectives are torch.distributed's, without user buffers",
    "interleave_glu_tensor": "operations take glu_interleave_size; elsewhere the halves are blocks, see torch.cat",
    "make_graphed_callables": "use torch.compile(mode='reduce-overhead')",
    "mark_not_offload": "use torch.autograd.graph.save_on_cpu",
    "onnx_export": "use torch.export",
    "prepare_for_saving": "autograd saves quantized tensors as they are",
    "restore_from_func_ctx": "autograd saves quantized tensors as they are",
    "restore_from_saved": "autograd saves quantized tensors as they are",
}
_OPERATIONS_INSTEAD = {
    "L2Normalization": "it is L2Norm",
    "ScaledSiTUGLU": "ScaledSwiGLU is here",
    "ScaledTanhSReLU": "SReLU is here",
    "SiTUGLU": "SwiGLU is here",
    "register_backward_fusion": "append to FUSIONS",
    "register_forward_fusion": "append to FUSIONS",
}


def missing_operation(name: str) -> str:
    """Return the sentence for a name that `te_models.layers.ops` does not have."""
    instead = f": {_OPERATIONS_INSTEAD[name]}" if name in _OPERATIONS_INSTEAD else ""
    return f"module 'te_models.layers.ops' has no attribute {name!r}{instead}"


def missing(name: str) -> str:
    """Return the sentence for a name that `te_models.layers` does not have."""
    instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    return f"module 'te_models.layers' has no attribute {name!r}{instead}"
