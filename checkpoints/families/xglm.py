"""xglm: computed positions, the first of which is number 2; LayerNorm, GELU without gate, biases (arXiv 2112.10668)."""

import math

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ACTIVATIONS, PaddingIdx, layer_norm_entries
from .base.family import Family
from .base.fields import Choice, Field, Fixed, HFConfig, OneOf, Only, OwnEntry, Values, fixed, read_typed
from .base.names import Names


class ScaledEmbedding(OwnEntry):
    """`scale_embedding`: embeddings times the root of the hidden size, or not."""

    names = ("scale_embedding",)
    hidden = ("d_model", "hidden_size")
    """Names of the hidden size; the first that is there counts."""
    zero_pad = True
    """Whether the position of number `pad_token_id` is a zero vector in transformers' class; no token has that position
    if the number is at most 1."""

    def read(self, hf: HFConfig) -> Values:
        pad = hf.get("pad_token_id", 1)
        if self.zero_pad and isinstance(pad, int) and pad not in (0, 1):
            raise CheckpointError(f"config.json has pad_token_id = {pad}; supported: 0, 1 or null")
        hidden = read_typed(hf, next((name for name in self.hidden if name in hf), self.hidden[-1]), int, 1024)
        return {"embedding.multiplier": math.sqrt(hidden)} if read_typed(hf, "scale_embedding", bool, True) else {}

    def write(self, config: ModelConfig) -> Values:
        return {"scale_embedding": config.embedding.multiplier != 1.0}


XGLM = Family(
    model_type="xglm",
    architecture="XGLMForCausalLM",
    fields=(
        Field("vocab_size", "vocab_size", int, 256008),
        OneOf(("d_model", "hidden_size"), "hidden_size", int, 1024),
        OneOf(("num_layers", "num_hidden_layers"), "num_layers", int, 24),
        OneOf(("attention_heads", "num_attention_heads"), "attention.num_attention_heads", int, 16),
        Field("ffn_dim", "mlp.ffn_hidden_size", int, 4096),
        Field("max_position_embeddings", "max_position_embeddings", int, 2048),
        Choice("activation_function", "mlp.activation", ACTIVATIONS, "gelu"),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, True),
        Field("attention_dropout", "attention.attention_dropout", float, 0.1),
        Field("dropout", "hidden_dropout", float, 0.1),
        Field("init_std", "init_method_std", float, 0.02),
        PaddingIdx(1),
        ScaledEmbedding(),
        *layer_norm_entries(bias=True),
        *fixed({"norm.layernorm_epsilon": 1e-5, "mlp.gated": False, "mlp.bias": True, "attention.add_qkv_bias": True}),
        *fixed({"attention.add_output_bias": True, "embedding.position_embedding_type": "sinusoidal"}),
        Fixed("embedding.position_offset", 2),
        Only("activation_dropout", 0.0),
        Only("layerdrop", 0.0),
    ),
    names=Names(
        final_norm="model.layer_norm",
        norms=("self_attn_layer_norm", None, "final_layer_norm", None),
        proj="self_attn.out_proj",
        fc1=("fc1",),
        fc2="fc2",
    ),
)
