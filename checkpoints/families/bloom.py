"""bloom: ALiBi, normed embeddings, LayerNorm, GELU without gate, biases, q, k and v head by head (arXiv 2211.05100)."""

from .base.common import Dropouts, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, OneOf, Only, fixed
from .base.names import Names, form_within
from .base.nested import TimesHidden

_FORM = Names(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    layer="transformer.h.{i}",
    qkv=("self_attention.query_key_value",),
    heads_in_turn=True,
    proj="self_attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
)

BLOOM = Family(
    model_type="bloom",
    fields=(
        Field("vocab_size", "vocab_size", int, 250880),
        OneOf(("hidden_size", "n_embed"), "hidden_size", int, 64),
        OneOf(("n_layer", "num_hidden_layers"), "num_layers", int, 2),
        OneOf(("n_head", "num_attention_heads"), "attention.num_attention_heads", int, 8),
        Field("seq_length", "max_position_embeddings", int, 2048),
        TimesHidden(None, ("hidden_size", "n_embed"), default_hidden=64),
        Fixed("mlp.activation", "gelu_tanh"),
        Field("layer_norm_epsilon", "norm.layernorm_epsilon", float, 1e-5),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, True),
        Field("attention_dropout", "attention.attention_dropout", float, 0.0),
        Dropouts("hidden_dropout", None),
        Field("initializer_range", "init_method_std", float, 0.02),
        Only("apply_residual_connection_post_layernorm", False),
        *layer_norm_entries(bias=True),
        Fixed("embedding.layernorm", True, ("pretraining_tp", "slow_but_exact")),  # which are of rounding alone
        *fixed({"embedding.position_embedding_type": "alibi", "mlp.gated": False, "mlp.bias": True}),
        *fixed({"attention.add_qkv_bias": True, "attention.add_output_bias": True}),
    ),
    names=_FORM,
    other_names=(form_within(_FORM, "transformer."),),
)
