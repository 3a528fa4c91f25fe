"""opt: learned positions behind two unused rows, LayerNorm, ReLU without gate, biases (arXiv 2205.01068). Not the 350m
model, whose norms come after each sum and whose embeddings are narrower than its layers."""

from .base.common import Dropouts, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, Only, SameAs, Spread, fixed
from .base.names import Names, form_within
from .gpt_neox import SameHeadDim

_ELSEWHERE = ("head_dim", "num_key_value_heads", "rms_norm_eps", "intermediate_size", "initializer_range")
_FORM = Names(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{i}",
    norms=("self_attn_layer_norm", None, "final_layer_norm", None),
    proj="self_attn.out_proj",
    fc1=("fc1",),
    fc2="fc2",
)

OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    fields=(
        *decoder_fields(
            max_positions=2048,
            activation="relu",
            activation_name="activation_function",
            tied=True,
            pad=1,
            without=_ELSEWHERE,
        ),
        Field("ffn_dim", "mlp.ffn_hidden_size", int, 3072),
        Field("init_std", "init_method_std", float, 0.02),
        SameHeadDim(),
        *layer_norm_entries(bias=True),
        Spread("layer_norm_elementwise_affine", ("norm.has_weight", "norm.bias"), True),
        *fixed({"norm.layernorm_epsilon": 1e-5, "mlp.gated": False}),
        Spread("enable_bias", ("mlp.bias", "attention.add_qkv_bias", "attention.add_output_bias"), True),
        *fixed({"embedding.position_embedding_type": "learned_absolute", "embedding.position_offset": 2}),
        Fixed("embedding.positions_from_mask", True),
        SameAs("word_embed_proj_dim", "hidden_size", "hidden_size", 768),  # else projections lie around the layers
        Only("do_layer_norm_before", True),
        Only("_remove_final_layer_norm", False),
        Only("layerdrop", 0.0),
        Dropouts("dropout", None, 0.1),
    ),
    names=_FORM,
    other_names=(form_within(_FORM, "model."),),
)
