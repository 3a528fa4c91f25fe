"""Sublayers of one new token of each sequence, in eager code on a CPU: what their modules compute, in one function.

The products of a token take as long as reading the weights, half a millisecond for a layer of a small model; walking
through the modules to them takes as long again, in questions whose answer is the same for every token: which recipe,
which mask, which ranks. Here they are asked once for a sublayer. What computes is the same, with the same bits, but
that caches of few keys are read by our attention, too.

A sublayer is left to its modules (None) where a gradient is wanted or a recipe is in force, where somebody looks on
(hooks, adapters, a compiler, a mode of torch), and where it has what a plain one does not have. B batch, H hidden, N
query heads, G key/value heads, D head channels.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from te_models.kernels.activation import Activation
from te_models.kernels.cpu_rows import rms_norm
from te_models.kernels.decode_attention import attend_one, uses_decode_attention
from te_models.kernels.gemm import gemv
from te_models.kernels.rope import apply_rope
from te_models.layers.attention.dot_product_attention import DotProductAttention
from te_models.layers.gemm.plain import stored_linear
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.linear import Linear
from te_models.layers.recipe.context import state
from te_models.layers.tensor.quantized_tensor import QuantizedTensor

from .cache import LayerMemory
from .mixers.attention import SelfAttention
from .mlp import MLP
from .rotary import Rotary

_modules: Any = nn.modules.module


def is_one_token(x: Tensor) -> bool:
    """Whether x: [B, 1, H] is one token of each of a few sequences on a CPU, eagerly, without gradients or recipes."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.dim() != 3 or x.shape[1] != 1 or not x.is_cpu:
        return False
    if not 0 < x.shape[0] <= gemv.FEW or torch.is_autocast_enabled("cpu"):
        return False
    now = state()
    if now.compute is not None or now.calibrating or now.first_microbatch is not None:
        return False
    return not (_modules._global_forward_hooks or _modules._global_forward_pre_hooks)


def attention(a: nn.Module | None, x: Tensor, rotary: Rotary | None, cache: LayerMemory) -> Tensor | None:
    """Return what an attention sublayer returns of x: [B, 1, H], which `is_one_token`, without a mask; or None."""
    if type(a) is not SelfAttention or not a.is_plain or _watched(a) or cache.hidden_slots() is not None:
        return None
    modules, batch = cast("dict[str, Any]", a._modules), x.shape[0]
    core = modules["core_attention"]
    if type(core) is not DotProductAttention or _watched(core):
        return None
    qkv: Tensor = _normed_linear(modules["linear_qkv"], x)
    end, channels = a.q_size + a.k_size, a.head_dim
    if a.norm_kind == "none":
        qk = _rotated(qkv[..., :end].view(batch, 1, -1, channels), rotary, a.rope_style)
        q, k = qk[:, :, : a.num_heads], qk[:, :, a.num_heads :]
    else:
        q = modules["q_layernorm"](qkv[..., : a.q_size].view(batch, 1, -1, channels))
        k = modules["k_layernorm"](qkv[..., a.q_size : end].view(batch, 1, -1, channels))
        q, k = _rotated(q, rotary, a.rope_style), _rotated(k, rotary, a.rope_style)
    k, v = cache.update(k, qkv[..., end:].view(batch, 1, a.num_groups, -1))
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if _sees_all(core, k.shape[1]) and uses_decode_attention(query, key, value, None, 1):
        y = attend_one(query, key, value, None, core.softmax_scale).view(batch, 1, -1)
    else:
        y = a.attended(q, k, v, None, cache)
    return _linear(modules["linear_proj"], y)


def mlp(m: nn.Module | None, x: Tensor) -> Tensor | None:
    """Return what a dense sublayer returns of x: [B, 1, H], which `is_one_token`; or None."""
    if type(m) is not MLP or not m.is_plain or _watched(m):
        return None
    activation = m._activation
    if not isinstance(activation, Activation):
        return None
    return _linear(m._modules["linear_fc2"], activation.forward(_normed_linear(m._modules["linear_fc1"], x)))


def _watched(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _sees_all(core: DotProductAttention, keys: int) -> bool:
    """Whether the last query sees all keys that there are, with nothing done to their scores."""
    window = core.window_size
    if core.attn_mask_type != "causal_bottom_right" or not (window is None or (type(window) is int and keys <= window)):
        return False
    plain = core.softcap is None and core.softmax_type == "vanilla" and core._assigned_scale is None
    return plain and not (core.training and (core.attention_dropout > 0 or core.max_logits is not None))


def _linear(module: Any, x: Tensor) -> Tensor:
    """Return `module(x)`, x: [B, 1, K] -> [B, 1, N]."""
    y = _product(module, x) if type(module) is Linear and module.boundary == "kernel" else None
    return module(x) if y is None else y


def _normed_linear(module: Any, x: Tensor) -> Tensor:
    """Return `module(x)` of a norm and a product, x: [B, 1, K] -> [B, 1, N]."""
    if type(module) is LayerNormLinear and module.normalization == "RMSNorm" and module.layer_norm_bias is None:
        last = module.cast_order == "weight_last"
        normed = rms_norm(x, module.layer_norm_weight, module.eps, module.zero_centered_gamma, last)
        y = None if normed is None else _product(module, normed)
        if y is not None:
            return y
    return module(x)


def _product(module: Any, x: Tensor) -> Tensor | None:
    """Return x: [B, 1, K] by the weight of a module that does nothing else with its weight: [B, 1, N]; or None."""
    if _watched(module) or module.parallel_mode is not None or module.parameters_split is not None:
        return None
    if module.return_bias or module.return_layernorm_output or not module.ran_plainly:
        return None
    parameters = module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if isinstance(weight, QuantizedTensor):
        return stored_linear(x, weight, bias)
    if not gemv.uses_gemv(x, weight, bias):
        return None
    return gemv.multiply(x.view(x.shape[0], -1), weight, bias).view(x.shape[0], 1, -1)


def _rotated(t: Tensor, rotary: Rotary | None, style: str) -> Tensor:
    return t if rotary is None else apply_rope(t, *rotary, style)
