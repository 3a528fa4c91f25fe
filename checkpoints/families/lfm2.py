"""lfm2: gated short convolutions, and attention with normed queries and keys in some layers (arXiv 2511.23404)."""

from te_models.config import ModelConfig

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed, HFConfig, OwnEntry, Values, read_typed
from .base.names import Names
from .base.recurrent import MixerField, RecurrentLayers, ShortConvolutionNames
from .base.rope import Rope


class AdjustedWidth(OwnEntry):
    """`intermediate_size` (`block_ff_dim` wins), of which with `block_auto_adjust_ff_dim` two thirds, times a factor,
    rounded up to a multiple, are the width of the MLP. It is written as it is, not adjusted."""

    names = (
        "intermediate_size",
        "block_ff_dim",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
    )

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, "block_ff_dim" if "block_ff_dim" in hf else "intermediate_size", int, 12288)
        if read_typed(hf, "block_auto_adjust_ff_dim", bool, True):
            size = int(2 * size / 3)
            if hf.get("block_ffn_dim_multiplier", 1.0) is not None:
                size = int(read_typed(hf, "block_ffn_dim_multiplier", float, 1.0) * size)
                multiple = read_typed(hf, "block_multiple_of", int, 256)
                size = -(-size // multiple) * multiple
        return {"mlp.ffn_hidden_size": size}

    def write(self, config: ModelConfig) -> Values:
        return {"intermediate_size": config.mlp.ffn_hidden_size, "block_auto_adjust_ff_dim": False}


class Tied(OwnEntry):
    """`tie_word_embeddings`; in its place older files have `tie_embedding`, and it wins."""

    names = ("tie_word_embeddings", "tie_embedding")

    def read(self, hf: HFConfig) -> Values:
        name = "tie_embedding" if "tie_embedding" in hf else "tie_word_embeddings"
        return {"embedding.share_embeddings_and_output_weights": read_typed(hf, name, bool, True)}

    def write(self, config: ModelConfig) -> Values:
        return {"tie_word_embeddings": config.embedding.share_embeddings_and_output_weights}


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    """`full_attn_idxs`: the layers with attention; all of them without the field."""
    full = read_typed(hf, "full_attn_idxs", list, None)
    return ["full_attention" if full is None or i in full else "conv" for i in range(layers)]


CONVOLUTIONS = RecurrentLayers(
    kind="short_convolution",
    parts=(MixerField("conv_L_cache", "conv_kernel_size", int, 3), MixerField("conv_bias", "use_bias", bool, False)),
    word=("conv",),
    pattern=_pattern,
    hidden_as="channels",
    extra=("full_attn_idxs",),
)
FORM = Names(
    final_norm="model.embedding_norm",
    norms=("operator_norm", None, "ffn_norm", None),
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    proj="self_attn.out_proj",
    fc1=("feed_forward.w1", "feed_forward.w3"),
    fc2="feed_forward.w2",
    mixers={"short_convolution": ShortConvolutionNames()},
)
WITHOUT = ("intermediate_size", "tie_word_embeddings", "attention_dropout", "hidden_act")

LFM2 = Family(
    model_type="lfm2",
    fields=(
        *decoder_fields(max_positions=128_000, norm_eps=1e-5, norm_name="norm_eps", kv_heads=8, pad=0, without=WITHOUT),
        AdjustedWidth(),
        Tied(),
        Fixed("attention.qk_layernorm", "head"),
        Rope(1_000_000.0),
    ),
    mixers=CONVOLUTIONS,
    names=FORM,
)
