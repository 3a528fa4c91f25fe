"""persimmon: LayerNorm, also of each head of q and k, squared ReLU without gate, half of each head rotated, biases."""

from dataclasses import replace

from .base.common import decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Fixed, Only, fixed
from .base.names import Names
from .base.rope import Rope
from .gpt_neox import SameHeadDim
from .phi import QK_LAYERNORM

PERSIMMON = Family(
    model_type="persimmon",
    fields=(
        *decoder_fields(
            max_positions=16384,
            norm_eps=1e-5,
            norm_name="layer_norm_eps",
            activation="relu2",
            without=("head_dim", "num_key_value_heads"),
        ),
        SameHeadDim(),
        *layer_norm_entries(bias=True),
        *fixed({"mlp.gated": False, "mlp.bias": True, "attention.add_qkv_bias": True}),
        Fixed("attention.add_output_bias", True),
        replace(QK_LAYERNORM, default=True),
        Only("hidden_dropout", 0.0),  # of the MLP's output alone
        Rope(partial=0.5),
    ),
    names=Names(
        final_norm="model.final_layernorm",
        qkv=("self_attn.query_key_value",),
        heads_in_turn=True,
        qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        proj="self_attn.dense",
        fc1=("mlp.dense_h_to_4h",),
        fc2="mlp.dense_4h_to_h",
    ),
)
