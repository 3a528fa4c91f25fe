"""biogpt: learned positions, the first of them number 2; LayerNorm, GELU without gate, biases (arXiv 2210.10341)."""

from .base.common import ACTIVATIONS, PaddingIdx, layer_norm_entries
from .base.family import Family
from .base.fields import Choice, Field, Fixed, Only, fixed
from .base.names import Names
from .xglm import ScaledEmbedding


class UnpaddedEmbedding(ScaledEmbedding):
    """... and no position is a zero vector."""

    hidden = ("hidden_size",)
    zero_pad = False


BIOGPT = Family(
    model_type="biogpt",
    architecture="BioGptForCausalLM",
    fields=(
        Field("vocab_size", "vocab_size", int, 42384),
        Field("hidden_size", "hidden_size", int, 1024),
        Field("num_hidden_layers", "num_layers", int, 24),
        Field("num_attention_heads", "attention.num_attention_heads", int, 16),
        Field("intermediate_size", "mlp.ffn_hidden_size", int, 4096),
        Field("max_position_embeddings", "max_position_embeddings", int, 1024),
        Choice("hidden_act", "mlp.activation", ACTIVATIONS, "gelu"),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, True),
        Field("attention_probs_dropout_prob", "attention.attention_dropout", float, 0.1),
        Field("hidden_dropout_prob", "hidden_dropout", float, 0.1),
        Field("initializer_range", "init_method_std", float, 0.02),
        PaddingIdx(1),
        UnpaddedEmbedding(),
        *layer_norm_entries(bias=True),
        Fixed("norm.layernorm_epsilon", 1e-5, ("layer_norm_eps",)),  # which transformers' layers do not read
        *fixed({"mlp.gated": False, "mlp.bias": True, "attention.add_qkv_bias": True}),
        *fixed({"attention.add_output_bias": True, "embedding.position_embedding_type": "learned_absolute"}),
        Fixed("embedding.position_offset", 2),
        Only("activation_dropout", 0.0),
        Only("layerdrop", 0.0),
    ),
    names=Names(
        embedding="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        final_norm="biogpt.layer_norm",
        output="output_projection",
        layer="biogpt.layers.{i}",
        norms=("self_attn_layer_norm", None, "final_layer_norm", None),
        proj="self_attn.out_proj",
        fc1=("fc1",),
        fc2="fc2",
    ),
)
