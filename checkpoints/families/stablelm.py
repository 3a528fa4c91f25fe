"""stablelm: llama with LayerNorm, a quarter of each head rotated, and on request a norm of each head of q and k, and
attention and MLP side by side (arXiv 2402.17834)."""

from .base.common import decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Only, switch
from .base.names import Names
from .base.rope import Rope
from .gpt_neox import SameHeadDim

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
        switch("qk_layernorm", "attention.qk_layernorm", "each_head", "none"),  # with a weight of each head
        switch("use_parallel_residual", "block", "parallel_shared_norm", "pre"),
        Only("hidden_dropout", 0.0),  # of the MLP's output alone
        Rope(partial=0.25),
    ),
    names=Names(qk_norms=("self_attn.q_layernorm.norms.{h}", "self_attn.k_layernorm.norms.{h}")),
)
