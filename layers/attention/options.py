"""What a call of an attention module says beside its tensors; what it means: see `DotProductAttention.forward`."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from .alibi import BiasType
from .mask import Window


class CoreOptions(TypedDict, total=False):
    """Keyword arguments of `DotProductAttention.forward` that a transformer layer passes on."""

    bottom_right_diagonal: bool | None
    checkpoint_core_attention: bool
    core_attention_bias_type: BiasType
    core_attention_bias: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    fast_zero_fill: bool
    inference_params: None
    pad_between_seqs: bool | None


class AttentionOptions(CoreOptions, total=False):
    """Those that `MultiheadAttention` passes on."""

    attn_mask_type: str | None
    window_size: Window | None
