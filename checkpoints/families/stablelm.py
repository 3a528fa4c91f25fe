"""stablelm: llama with LayerNorm, a quarter of each head rotated, and on request a norm of each head of q and k, and
attention and MLP side by side (arXiv 2402.17834)."""

from __future__ import annotations

from te_models.config import ModelConfig

from .base.common import decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, HFConfig, Only, OwnEntry, Values, read_typed
from .base.names import Names
from .base.rope import Rope
from .gpt_neox import SameHeadDim


class SharedNormResidual(OwnEntry):
    """`use_parallel_residual`: attention and MLP side by side behind one norm, or one after the other."""

    names = ("use_parallel_residual",)

    def read(self, hf: HFConfig) -> Values:
        parallel = read_typed(hf, "use_parallel_residual", bool, False)
        return {"block": "parallel_shared_norm" if parallel else "pre"}

    def write(self, config: ModelConfig) -> Values:
        return {"use_parallel_residual": config.block == "parallel_shared_norm"}


class NormOfHeads(OwnEntry):
    """`qk_layernorm`: a LayerNorm of each head of q and k with one weight per head."""

    names = ("qk_layernorm",)

    def read(self, hf: HFConfig) -> Values:
        normed = read_typed(hf, "qk_layernorm", bool, False)
        return {"attention.qk_layernorm": "each_head" if normed else "none"}

    def write(self, config: ModelConfig) -> Values:
        return {"qk_layernorm": config.attention.qk_layernorm == "each_head"}


STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fields=(
        *decoder_fields(
            max_positions=4096, norm_eps=1e-5, norm_name="layer_norm_eps", kv_heads=32, without=("head_dim",)
        ),
        SameHeadDim(),
        *layer_norm_entries(bias=True),
        Field("use_qkv_bias", "attention.add_qkv_bias", bool, False),
        NormOfHeads(),
        SharedNormResidual(),
        Only("hidden_dropout", 0.0),  # of the MLP's output alone
        Rope(partial=0.25),
    ),
    names=Names(qk_norms=("self_attn.q_layernorm.norms.{h}", "self_attn.k_layernorm.norms.{h}")),
)
