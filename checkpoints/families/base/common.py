"""Configuration entries that most decoder families share."""

from collections.abc import Collection
from dataclasses import dataclass

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, Choice, Entry, Field, Fixed, HFConfig, Spread, Values, fixed, read_typed

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
SILU = {name: ACTIVATIONS[name] for name in ("silu", "swish")}
"""Activations of models whose convolutions have the activation of the MLP, too."""


ATTENTION_BIAS = Spread("attention_bias", ("attention.add_qkv_bias", "attention.add_output_bias"))
"""`attention_bias`: one flag for the q, k, v and output projections."""


def decoder_fields(
    *,
    max_positions: int,
    norm_eps: float = 1e-6,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    activation: str = "silu",
    activation_name: str = "hidden_act",
    activations: dict[str, str] = ACTIVATIONS,
    norm_name: str = "rms_norm_eps",
    init_std: float = 0.02,
    dropout: float = 0.0,
    pad: int | None = None,
    without: Collection[str] = (),
) -> tuple[Entry, ...]:
    """Return the fields of a decoder with grouped-query attention; the arguments are the class's names and defaults.
    without: fields that the class does not have, or reads differently."""
    entries: tuple[Entry, ...] = (
        Field("vocab_size", "vocab_size", int),
        Field("hidden_size", "hidden_size", int),
        Field("num_hidden_layers", "num_layers", int),
        Field("num_attention_heads", "attention.num_attention_heads", int),
        Field("max_position_embeddings", "max_position_embeddings", int, max_positions),
        Field(norm_name, "norm.layernorm_epsilon", float, norm_eps),
        Field("intermediate_size", "mlp.ffn_hidden_size", int),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, tied),
        Field("attention_dropout", "attention.attention_dropout", float, dropout, null=True),
        Field("initializer_range", "init_method_std", float, init_std),
        Choice(activation_name, "mlp.activation", activations, activation),
        KeyValueHeads(kv_heads),
        HeadDim(head_dim),
    )
    fields = tuple(entry for entry in entries if not set(entry.names) <= set(without))
    return fields if "pad_token_id" in without else (*fields, PaddingIdx(pad))


@dataclass(frozen=True)
class Dropouts:
    """Dropout of the output of each sublayer, `hidden`, and of the embeddings, `embedding`; None: those are never
    dropped. Of ours, the latter is left unset where both are the same."""

    hidden: str
    embedding: str | None
    default: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hidden,) if self.embedding is None else (self.hidden, self.embedding)

    def read(self, hf: HFConfig) -> Values:
        hidden = read_typed(hf, self.hidden, float, self.default)
        embedding = 0.0 if self.embedding is None else read_typed(hf, self.embedding, float, self.default)
        return {"hidden_dropout": hidden} | ({} if embedding == hidden else {"embedding.embedding_dropout": embedding})

    def write(self, config: ModelConfig) -> Values:
        return dict(zip(self.names, (config.hidden_dropout, config.embedding_dropout)))


@dataclass(frozen=True)
class PaddingIdx:
    """`pad_token_id` as transformers' embedding takes it: its row gets no gradient. `default`: the class's, where the
    file does not say; null means none, and a negative one counts from the last token. A token that the vocabulary does
    not have is ignored. It is written where the model has one, and no field of the model's otherwise."""

    default: int | None
    names: tuple[str, ...] = ()

    def read(self, hf: HFConfig) -> Values:
        token, words = hf.get("pad_token_id", self.default), read_typed(hf, "vocab_size", int, REQUIRED)
        token = None if token is None else read_typed({"pad_token_id": token}, "pad_token_id", int, None)
        known = token is not None and -words <= token < words
        return {"embedding.padding_idx": token % words} if known else {}

    def write(self, config: ModelConfig) -> Values:
        token = config.embedding.padding_idx
        return {} if token is None else {"pad_token_id": token}


def layer_norm_entries(*, bias: bool, weight: bool = True) -> tuple[Entry, ...]:
    """Return what makes the norm a LayerNorm instead of an RMSNorm."""
    return (
        *fixed({"norm.normalization": "LayerNorm", "norm.cast_order": "weight_first", "norm.has_weight": weight}),
        Fixed("norm.bias", bias),
    )


def _int_or_null(hf: HFConfig, name: str, default: int | None) -> int | None:
    """Return an integer, `default` where it is absent, None where it is null."""
    return read_typed(hf, name, int, None) if name in hf else default


@dataclass(frozen=True)
class KeyValueHeads:
    """`num_key_value_heads`: null means as many as query heads; absent means `default`."""

    default: int | None
    names: tuple[str, ...] = ("num_key_value_heads",)

    def read(self, hf: HFConfig) -> Values:
        heads = _int_or_null(hf, "num_key_value_heads", self.default)
        return {} if heads is None else {"attention.num_query_groups": heads}

    def write(self, config: ModelConfig) -> Values:
        return {"num_key_value_heads": config.attention.num_query_groups}


@dataclass(frozen=True)
class HeadDim:
    """`head_dim`: null means hidden_size / heads, rounded down as transformers does; absent means `default`."""

    default: int | None
    names: tuple[str, ...] = ("head_dim",)

    def read(self, hf: HFConfig) -> Values:
        size = _int_or_null(hf, "head_dim", self.default)
        if size is None:
            heads = read_typed(hf, "num_attention_heads", int, REQUIRED)
            if heads <= 0:
                raise CheckpointError(f"config.json has num_attention_heads = {heads}")
            size = read_typed(hf, "hidden_size", int, REQUIRED) // heads
        return {"attention.kv_channels": size}

    def write(self, config: ModelConfig) -> Values:
        return {"head_dim": config.attention.kv_channels}
