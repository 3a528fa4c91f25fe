"""gptj: attention and MLP side by side behind one LayerNorm, rotation in pairs, biases in the MLP and the output layer
alone (Wang and Komatsuzaki, 2021)."""

import math

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ACTIVATIONS, Dropouts, layer_norm_entries
from .base.family import Family
from .base.fields import (
    REQUIRED,
    Choice,
    Entry,
    Field,
    Fixed,
    HFConfig,
    OneOf,
    OwnEntry,
    Values,
    fixed,
    read_typed,
    shorten_value,
)
from .base.names import Names
from .base.unused import Unused
from .gpt2 import InnerSize


class RotatedChannels(OwnEntry):
    """`rotary_dim`: how many channels of each head rotate."""

    names = ("rotary_dim",)

    def read(self, hf: HFConfig) -> Values:
        hidden = read_typed(hf, "n_embd" if "n_embd" in hf else "hidden_size", int, REQUIRED)
        heads = read_typed(hf, "n_head" if "n_head" in hf else "num_attention_heads", int, REQUIRED)
        channels, rotated = hidden // max(heads, 1), read_typed(hf, "rotary_dim", int, 64)
        if rotated is None or not 0 < rotated <= channels:
            raise CheckpointError(
                f"config.json has rotary_dim = {shorten_value(rotated)}; allowed: 1 to {channels}, a head's channels"
            )
        share = rotated / channels
        return {"rope.rotary_percent": share if int(channels * share) == rotated else math.nextafter(share, 1)}

    def write(self, config: ModelConfig) -> Values:
        return {"rotary_dim": int(config.attention.key_channels * config.rope.rotary_percent)}


def gptj_fields(pad: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the fields of gptj and of codegen. pad: the entry of the padding token."""
    return (
        Field("vocab_size", "vocab_size", int),
        OneOf(("n_embd", "hidden_size"), "hidden_size", int),
        OneOf(("n_layer", "num_hidden_layers"), "num_layers", int),
        OneOf(("n_head", "num_attention_heads"), "attention.num_attention_heads", int),
        OneOf(("n_positions", "max_position_embeddings"), "max_position_embeddings", int, 2048),
        InnerSize(),
        RotatedChannels(),
        Choice("activation_function", "mlp.activation", ACTIVATIONS, "gelu_new"),
        Field("layer_norm_epsilon", "norm.layernorm_epsilon", float, 1e-5),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, False),
        Field("attn_pdrop", "attention.attention_dropout", float, 0.0),
        Dropouts("resid_pdrop", "embd_pdrop"),
        Field("initializer_range", "init_method_std", float, 0.02),
        *layer_norm_entries(bias=True),
        *fixed({"block": "parallel_shared_norm", "mlp.gated": False, "mlp.bias": True, "embedding.output_bias": True}),
        Fixed("rope.style", "interleaved"),
        *pad,
    )


FORM = Names(
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{i}",
    norms=("ln_1", None, None, None),
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    proj="attn.out_proj",
    fc1=("mlp.fc_in",),
    fc2="mlp.fc_out",
)
MASKS = Unused(("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask", "*.attn.embed_positions"))

GPTJ = Family(model_type="gptj", architecture="GPTJForCausalLM", fields=gptj_fields(()), names=FORM, unused=MASKS)
