"""gpt2: learned positions, LayerNorm, biases everywhere, linear weights stored [in, out] (Radford et al., 2019)."""

from te_models.config import ModelConfig

from .base.common import ACTIVATIONS, Dropouts, layer_norm_entries
from .base.family import Family
from .base.fields import REQUIRED, Choice, Field, HFConfig, OneOf, OwnEntry, Values, fixed, read_typed
from .base.names import Names, form_within
from .base.unused import Unused


class InnerSize(OwnEntry):
    """`n_inner`: null means four times the hidden size."""

    names = ("n_inner",)

    def read(self, hf: HFConfig) -> Values:
        hidden = read_typed(hf, "n_embd" if "n_embd" in hf else "hidden_size", int, REQUIRED)
        return {"mlp.ffn_hidden_size": read_typed(hf, "n_inner", int, None) or 4 * hidden}

    def write(self, config: ModelConfig) -> Values:
        size = config.mlp.ffn_hidden_size
        return {"n_inner": None if size == 4 * config.hidden_size else size}


class ScoreScale(OwnEntry):
    """`scale_attn_weights`: scores divided by the root of the head's size, or not. `scale_attn_by_inverse_layer_idx`:
    by the number of the layer, too, from 1, as Stanford's Mistral models and codeparrot have it. These also say
    `reorder_and_upcast_attn`, scores in float32. That changes only rounding: torch's attention has them so."""

    names = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")

    def read(self, hf: HFConfig) -> Values:
        scaled, by_layer = (read_typed(hf, name, bool, default) for name, default in zip(self.names, (True, False)))
        return {"attention.softmax_scale_by_layer": by_layer} | ({} if scaled else {"attention.softmax_scale": 1.0})

    def write(self, config: ModelConfig) -> Values:
        a = config.attention
        return dict(zip(self.names, (a.softmax_scale is None, a.softmax_scale_by_layer)))


_FORM = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{i}",
    norms=("ln_1", None, "ln_2", None),
    qkv=("attn.c_attn",),
    proj="attn.c_proj",
    fc1=("mlp.c_fc",),
    fc2="mlp.c_proj",
    transposed=True,
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields=(
        Field("vocab_size", "vocab_size", int),
        OneOf(("n_embd", "hidden_size"), "hidden_size", int),
        OneOf(("n_layer", "num_hidden_layers"), "num_layers", int),
        OneOf(("n_head", "num_attention_heads"), "attention.num_attention_heads", int),
        OneOf(("n_positions", "max_position_embeddings"), "max_position_embeddings", int, 1024),
        InnerSize(),
        Choice("activation_function", "mlp.activation", ACTIVATIONS, "gelu_new"),
        Field("layer_norm_epsilon", "norm.layernorm_epsilon", float, 1e-5),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, True),
        Field("attn_pdrop", "attention.attention_dropout", float, 0.1),
        Dropouts("resid_pdrop", "embd_pdrop", 0.1),
        Field("initializer_range", "init_method_std", float, 0.02),
        ScoreScale(),
        *layer_norm_entries(bias=True),
        *fixed({"mlp.gated": False, "mlp.bias": True, "attention.add_qkv_bias": True}),
        *fixed({"attention.add_output_bias": True, "embedding.position_embedding_type": "learned_absolute"}),
    ),
    names=_FORM,
    other_names=(form_within(_FORM, "transformer."),),
    unused=Unused(("*.attn.bias", "*.attn.masked_bias")),
)
