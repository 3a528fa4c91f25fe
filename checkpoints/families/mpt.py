"""mpt: ALiBi, LayerNorm without bias, GELU without gate, no biases, clamped q, k and v in the largest ones."""

from .base.common import layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, Nullable, OneOf, Only
from .base.names import Names
from .base.nested import TimesHidden, Within

_WITHOUT_EFFECT = ("learned_pos_emb", "init_device", "norm_type", "verbose", "init_config")
"""Positions are learned only without ALiBi."""

MPT = Family(
    model_type="mpt",
    fields=(
        Field("vocab_size", "vocab_size", int, 50368),
        OneOf(("d_model", "hidden_size"), "hidden_size", int, 2048),
        OneOf(("n_layers", "num_hidden_layers"), "num_layers", int, 24),
        OneOf(("n_heads", "num_attention_heads"), "attention.num_attention_heads", int, 16),
        Field("max_seq_len", "max_position_embeddings", int, 2048),
        Only("expansion_ratio", 4),
        TimesHidden(None, ("d_model", "hidden_size"), default_hidden=2048),
        Fixed("mlp.activation", "gelu"),
        Field("layer_norm_epsilon", "norm.layernorm_epsilon", float, 1e-5),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, True),
        Field("initializer_range", "init_method_std", float, 0.02),
        Within(
            "attn_config",
            (
                Only("attn_type", "multihead_attention"),
                Only("alibi", True),
                Only("alibi_bias_max", 8),
                Only("attn_pdrop", 0),
                Only("prefix_lm", False),
                Only("qk_ln", False),
                Only("attn_uses_sequence_id", False),
                Nullable("clip_qkv", "attention.clip_qkv", None),
                Nullable("softmax_scale", "attention.softmax_scale", None),
            ),
        ),
        Only("no_bias", True),
        Only("resid_pdrop", 0.0),
        Only("emb_pdrop", 0.0),
        Only("embedding_fraction", 1.0),
        *layer_norm_entries(bias=False),
        Fixed("embedding.position_embedding_type", "alibi", _WITHOUT_EFFECT),
        Fixed("mlp.gated", False),
    ),
    names=Names(
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        layer="transformer.blocks.{i}",
        norms=("norm_1", None, "norm_2", None),
        qkv=("attn.Wqkv",),
        proj="attn.out_proj",
        fc1=("ffn.up_proj",),
        fc2="ffn.down_proj",
    ),
)
