"""gemma: RMSNorm with 1 + weight, embeddings times sqrt(hidden size), GELU gates (arXiv 2403.08295)."""

from __future__ import annotations

from .common import ATTENTION_BIAS, decoder_fields
from .family import Family
from .fields import Fixed
from .rope import Rope

GEMMA_COMMON = (
    Fixed("norm.layernorm_zero_centered_gamma", True),
    Fixed("norm.cast_order", "weight_first"),
    Fixed("embedding.multiplier", "sqrt_hidden_in_weight_dtype"),
    ATTENTION_BIAS,
)

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields=(
        *decoder_fields(max_positions=8192, kv_heads=16, head_dim=256, tied=True, activation="gelu_pytorch_tanh"),
        *GEMMA_COMMON,
        Rope(),
    ),
)
