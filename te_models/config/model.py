"""The whole model: how its parts fit together."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from .embedding import EmbeddingConfig, NormConfig
from .layer_checks import check_layers
from .mixers import AttentionConfig, MixerConfig
from .mlp import MLPConfig, MoEConfig
from .part import ConfigError, ConfigPart, check
from .residual import AlternatingUpdatesConfig, DeepNormConfig, HyperConnectionConfig, PerLayerEmbeddingConfig
from .rope import RopeConfig
from .shared import SharedBlocksConfig

Block = Literal["pre", "post", "sandwich", "parallel", "parallel_shared_norm"]
"""Where the norms of a layer are."""
LayerType = Literal["full", "sliding", "chunked", "nope", "sliding_nope", "chunked_nope"]
"""What the queries of a layer see; "nope" of the whole past, and the others so named, without position encoding."""


MAX_MTP_LAYERS = 16
"""More than any model has; published ones have 1 or 3."""
MAX_LAYERS = 2_000
"""Far more than any model has: the kinds of all layers are a tuple, and a checkpoint has tensors of every layer,
counted before anything else looks at them."""


_NO_ATTENTION = AttentionConfig(num_attention_heads=1, kv_channels=1 << 40)
"""Stands where no layer has `attention`: no model has that many channels."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigPart):
    """A GPT or MoE language model.

    Example:
        ModelConfig(vocab_size=49152, hidden_size=576, num_layers=30, max_position_embeddings=8192,
                    attention=AttentionConfig(num_attention_heads=9, num_query_groups=3),
                    mlp=MLPConfig(ffn_hidden_size=1536))

    What is derived where it is None (`layer_types`, `moe.layers`, `attention`'s `kv_channels`) is filled in, and
    derived again by `replace`: `config.replace(num_layers=4)` has 4 layer types.
    """

    vocab_size: int
    """Number of tokens that the embedding and the output layer know."""
    hidden_size: int
    """Channels of the residual stream."""
    num_layers: int
    """Number of layers."""
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    attention: AttentionConfig = _NO_ATTENTION
    """Self attention of every layer, or of those that name it; left out where layer_mixers names it nowhere."""
    mlp: MLPConfig
    """MLP of the dense layers."""
    norm: NormConfig = field(default_factory=NormConfig)
    """Norms of the residual stream."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embedding."""
    rope_sliding: RopeConfig | None = None
    """Rotary position embedding of sliding layers; unset means the other layers' one."""
    moe: MoEConfig | None = None
    """Mixture of experts; unset means a dense model."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """Token embedding and output layer."""
    block: Block = "pre"
    """Where the norms are: before each sublayer (pre), after it (post), both (sandwich), or attention and MLP side
    by side with two norms (parallel) or one (parallel_shared_norm)."""
    layer_types: tuple[LayerType, ...] | None = None
    """What the queries of each layer see; unset means all full, or all sliding where attention.window_size is set."""
    mixers: Mapping[str, MixerConfig] | None = None
    """Further token mixers by name: other attentions, and other kinds, as `kind` tells."""
    layer_mixers: tuple[str, ...] | None = None
    """The mixer of each layer: "attention", a name in `mixers`, two side by side ("attention+NAME"), or "none"; unset
    means attention."""
    mlp_layers: tuple[int, ...] | None = None
    """Indices of the layers that have an MLP or experts, from 0; unset means all layers."""
    layer_blocks: tuple[Block, ...] | None = None
    """Where the norms of each layer are, "pre", "post" or "sandwich", in place of block; unset means block in all."""
    kv_source_layers: tuple[int, ...] | None = None
    """For each layer the one whose keys and values its attention reads, an earlier one or itself; unset: itself."""
    shared_blocks: SharedBlocksConfig | None = None
    """Blocks of attention and an MLP that several layers share; unset means none."""
    hyper_connections: HyperConnectionConfig | None = None
    """Hyper-connections: a residual stream of several lanes; unset means one."""
    deep_norm: DeepNormConfig | None = None
    """Residual connections from behind the norms, with factors; unset means from before them."""
    alternating_updates: AlternatingUpdatesConfig | None = None
    """Alternating updates: a residual stream of several lanes, of which layers read one; unset means one lane."""
    laurel_rank: int | None = None
    """Rank of a learned augmented residual beside attention (LAuReL, arXiv 2411.07501); unset means none."""
    per_layer_embedding: PerLayerEmbeddingConfig | None = None
    """Embeddings of each layer, added behind its MLP; unset means none."""
    layer_scalar: bool = False
    """Whether a stored number multiplies the stream behind each layer."""
    ffn_hidden_sizes: tuple[int, ...] | None = None
    """For each layer the channels of its dense MLP; unset means mlp.ffn_hidden_size in all."""
    activation_sparsity: tuple[float, ...] | None = None
    """For each layer the fraction of MLP gates that are zero: what is below mean + z * deviation of a token's gates; 0
    means that all count; unset means 0 in all layers."""
    residual_multiplier: float = 1.0
    """Factor of what each sublayer adds to the residual stream."""
    hidden_dropout: float = 0.0
    """Probability with which the output of a sublayer is dropped in training, attention and MLP each by itself."""
    init_method_std: float = 0.02
    """Standard deviation of random initial weights."""
    mtp_num_layers: int = 0
    """Number of layers behind the model that predict further tokens, one more ahead each (multi-token prediction)."""
    mtp_loss_scaling_factor: float = 0.1
    """Factor of the mean loss of these layers in the loss that training minimises."""

    _LATER: ClassVar[frozenset[str]] = frozenset(
        {
            *("attention", "mixers", "layer_mixers", "mlp_layers", "layer_blocks", "kv_source_layers"),
            *("shared_blocks", "hyper_connections", "deep_norm", "alternating_updates", "laurel_rank"),
            *("per_layer_embedding", "layer_scalar", "ffn_hidden_sizes", "activation_sparsity"),
        }
    )

    def _derivations(self) -> dict[str, Any]:
        attentions = [self.attention_of(i) for i in range(self.num_layers)]
        kinds = ("full" if a is None or a.window_size is None else "sliding" for a in attentions)
        values: dict[str, Any] = {"layer_types": tuple(kinds)}
        if self.attention.mla is None:
            size, rest = divmod(self.hidden_size, self.attention.num_attention_heads)
            values["attention.kv_channels"] = None if rest else size
        if self.moe is not None:
            values["moe.layers"] = tuple(filter(self.has_mlp, range(self.num_layers)))
        return values

    def _validate(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_position_embeddings"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        check(self.num_layers <= MAX_LAYERS, "num_layers", self.num_layers, f"at most {MAX_LAYERS}")
        self._check_mixers()
        heads = self.attention.num_attention_heads
        self._fill()
        check(
            self.attention.kv_channels is not None,
            "attention.kv_channels",
            None,
            f"a number, because hidden_size = {self.hidden_size} is not a multiple of {heads} heads",
        )
        for where, mixer in self.named_mixers().items():
            if isinstance(mixer, AttentionConfig):
                self._check_attention(where, mixer)
        kinds = self.layer_types or ()
        check(
            len(kinds) == self.num_layers, "layer_types", kinds, f"one entry for each of the {self.num_layers} layers"
        )
        for layer, kind in enumerate(kinds):
            for seen, name in (("sliding", "window_size"), ("chunked", "chunk_size")):
                attention = self.attention_of(layer) if kind.startswith(seen) else None
                has_size = attention is None or getattr(attention, name) is not None
                where = f"{'.'.join(self.place_of(layer))}.{name}"
                check(has_size, where, None, f"a size, because layer_types has {kind!r} layers")
        check_layers(self)
        check(0 <= self.hidden_dropout < 1, "hidden_dropout", self.hidden_dropout, "0 <= p < 1")
        pad, last = self.embedding.padding_idx, self.vocab_size - 1
        check(pad is None or 0 <= pad <= last, "embedding.padding_idx", pad, f"0 to {last}, or null")
        check(self.init_method_std >= 0, "init_method_std", self.init_method_std, "zero or a positive number")
        check(
            0 <= self.mtp_num_layers <= MAX_MTP_LAYERS, "mtp_num_layers", self.mtp_num_layers, f"0 to {MAX_MTP_LAYERS}"
        )
        check(self.mtp_loss_scaling_factor > 0, "mtp_loss_scaling_factor", self.mtp_loss_scaling_factor, "above 0")
        if self.moe is not None:
            layers = self.moe.layers or ()
            post = self.moe.post_layernorm
            check(self.blocks == {"pre"} or not post, "moe.post_layernorm", post, "false unless block is 'pre'")
            hashed = self.moe.hash_layers
            check(set(hashed) <= set(layers), "moe.hash_layers", hashed, f"some of {layers}")
            own = self.moe.own_norms
            check(self.block == "sandwich" or not own, "moe.own_norms", True, "false unless block is 'sandwich'")
            check(self.are_ordered(layers), "moe.layers", layers, self.ordered_layers)
            within = all(map(self.has_mlp, layers))
            check(within, "moe.layers", layers, f"some of mlp_layers = {self.mlp_layers}")

    def ffn_hidden_size(self, layer: int) -> int:
        """The channels between the two linear layers of the dense MLP of layer number `layer`."""
        return self.mlp.ffn_hidden_size if self.ffn_hidden_sizes is None else self.ffn_hidden_sizes[layer]

    def sparsity(self, layer: int) -> float:
        """The fraction of gates of the MLP of layer number `layer` that are zero."""
        return 0.0 if self.activation_sparsity is None else self.activation_sparsity[layer]

    def _check_mixers(self) -> None:
        """Check that layers name mixers that there are, and sublayers at all."""
        if (self.mixers, self.layer_mixers, self.mlp_layers) == (None, None, None) and self.attention != _NO_ATTENTION:
            return
        for name, mixer in (self.mixers or {}).items():
            free = name.isidentifier() and name not in ("attention", "none")
            check(free, "the name of a mixer", name, "a word of letters, digits and _, but attention and none")
            channels = not isinstance(mixer, AttentionConfig) or mixer.kv_channels is not None
            check(channels, f"mixers.{name}.kv_channels", None, "a number")
        known = ("attention", *(self.mixers or ()))
        if self.layer_mixers is not None:
            number = len(self.layer_mixers)
            check(number == self.num_layers, "the number of layer_mixers", number, f"num_layers = {self.num_layers}")
            for entry in dict.fromkeys(self.layer_mixers):
                names = self._names(entry)
                check(
                    all(name in known for name in names), "layer_mixers", entry, f"{', '.join(known)}, none, or a + b"
                )
                softmax = [isinstance(self._mixer(name), AttentionConfig) for name in names]
                pair = len(names) <= 1 or sorted(softmax) == [False, True]
                check(pair, "layer_mixers", entry, "one mixer, or an attention and a mixer of another kind")
        used = {name for layer in range(self.num_layers) for name in self.mixer_names(layer)}
        if self.attention == _NO_ATTENTION and "attention" in used:
            raise ConfigError("attention is None; allowed: an attention, which layers name", "attention")
        unused = [name for name in known[1:] if name not in used]
        check(not unused, "mixers", unused, "mixers that layer_mixers names")
        check(self.are_ordered(self.mlp_layers or ()), "mlp_layers", self.mlp_layers, self.ordered_layers)
        for layer in range(self.num_layers):
            check(
                bool(self.mixer_names(layer)) or self.has_mlp(layer),
                "layer_mixers",
                self.layer_mixers,
                f"a mixer in layer {layer}, which has no MLP",
            )

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values layer number `layer` reads; None where it has its own."""
        source = layer if self.kv_source_layers is None else self.kv_source_layers[layer]
        return None if source == layer else source

    def is_kv_source(self, layer: int) -> bool:
        """Whether later layers read the keys and values of layer number `layer`."""
        return any(source == layer for reader, source in enumerate(self.kv_source_layers or ()) if reader != layer)

    def _check_attention(self, where: str, attention: AttentionConfig) -> None:
        bias = attention.qk_layernorm_bias and self.norm.normalization == "RMSNorm"
        check(not bias, f"{where}.qk_layernorm_bias", True, "false with RMSNorm")
        channels = attention.rotated_channels
        ropes = {"rope": self.rope, "rope_sliding": self.rope_sliding}
        if attention.rope is not None:
            ropes = {f"{where}.rope": attention.rope}
        for name, rope in ropes.items():
            if self.embedding.position_embedding_type == "rope" and rope is not None:
                rotated = int(channels * rope.rotary_percent)
                check(
                    (rotated > 0 and rotated % 2 == 0) or rope.scaling == "proportional",
                    f"{name}.rotary_percent",
                    rope.rotary_percent,
                    f"a fraction that rotates an even number of the {channels} head channels",
                )
                for factors in ("short_factor", "long_factor"):
                    number = len(getattr(rope, factors) or ()) or None
                    allowed = f"{rotated // 2}, one for each pair of the {rotated} channels that are rotated"
                    check(number in (None, rotated // 2), f"the number of {name}.{factors}", number, allowed)

    def shared_block_of(self, layer: int) -> int | None:
        """The number of the shared block that layer number `layer` uses; None where it uses none."""
        return None if self.shared_blocks is None else self.shared_blocks.block_of(layer)

    def named_mixers(self) -> dict[str, MixerConfig]:
        """The mixers that layers name, by the name of their table: "attention", "mixers.NAME"."""
        used = self.layer_mixers is None or any("attention" in self._names(entry) for entry in self.layer_mixers)
        own: dict[str, MixerConfig] = {"attention": self.attention} if used else {}
        return own | {f"mixers.{name}": mixer for name, mixer in (self.mixers or {}).items()}

    def are_ordered(self, layers: tuple[int, ...]) -> bool:
        """Whether indices of layers increase, and the model has these layers."""
        return list(layers) == sorted(set(layers)) and all(0 <= i < self.num_layers for i in layers)

    @property
    def ordered_layers(self) -> str:
        """What is allowed where `are_ordered` is not so, for an error."""
        return f"increasing layer indices below num_layers = {self.num_layers}"

    @staticmethod
    def _names(entry: str) -> tuple[str, ...]:
        return () if entry == "none" else tuple(entry.split("+"))

    def _mixer(self, name: str) -> MixerConfig:
        return self.attention if name == "attention" else (self.mixers or {})[name]

    def place_of(self, layer: int) -> tuple[str, ...]:
        """The table of the attention of layer number `layer`, as the words of its key."""
        names = [n for n in self.mixer_names(layer) if n == "attention" or isinstance(self._mixer(n), AttentionConfig)]
        return ("attention",) if names in ([], ["attention"]) else ("mixers", names[0])

    def mixer_names(self, layer: int) -> tuple[str, ...]:
        """The names of the mixers of layer number `layer` (from 0): one, two side by side, or none."""
        return ("attention",) if self.layer_mixers is None else self._names(self.layer_mixers[layer])

    def attention_of(self, layer: int) -> AttentionConfig | None:
        """The attention of layer number `layer`; None where it has none."""
        found = (self._mixer(name) for name in self.mixer_names(layer))
        return next((mixer for mixer in found if isinstance(mixer, AttentionConfig)), None)

    def mixer_of(self, layer: int) -> MixerConfig | None:
        """The mixer of layer number `layer` that is no attention; None where it has none."""
        found = (self._mixer(name) for name in self.mixer_names(layer))
        return next((mixer for mixer in found if not isinstance(mixer, AttentionConfig)), None)

    def has_mlp(self, layer: int) -> bool:
        """Whether layer number `layer` has an MLP or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def mixers_of(self, layers: Sequence[int]) -> dict[str, Any]:
        """The fields that name mixers and MLPs of a model with these layers of this one alone, in their order."""
        fields: dict[str, Any] = {}
        if self.layer_mixers is not None:
            names = tuple(self.layer_mixers[layer] for layer in layers)
            used = {name for entry in names for name in self._names(entry)}
            some = {name: mixer for name, mixer in (self.mixers or {}).items() if name in used}
            alike = set(names) == {"attention"}
            fields = {"layer_mixers": None if alike else names, "mixers": some or None}
        if self.layer_blocks is not None:
            fields["layer_blocks"] = tuple(self.layer_blocks[layer] for layer in layers)
        if self.shared_blocks is not None:
            uses = tuple(i for i, layer in enumerate(layers) if layer in self.shared_blocks.layers)
            number = min(self.shared_blocks.num_blocks, len(uses))
            fields["shared_blocks"] = self.shared_blocks.replace(layers=uses, num_blocks=number) if uses else None
        if self.mlp_layers is not None:
            fields["mlp_layers"] = tuple(i for i, layer in enumerate(layers) if layer in self.mlp_layers)
        if self.kv_source_layers is not None:
            places = {layer: place for place, layer in enumerate(layers)}
            sources = (places.get(self.kv_source_layers[layer], place) for layer, place in places.items())
            own = tuple(sources)
            fields["kv_source_layers"] = None if own == tuple(range(len(layers))) else own
        for name in ("ffn_hidden_sizes", "activation_sparsity"):
            values = getattr(self, name)
            fields |= {} if values is None else {name: tuple(values[layer] for layer in layers)}
        return fields

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has an MLP without experts."""
        return any(self.has_mlp(i) and not self.is_moe_layer(i) for i in range(self.num_layers))

    def block_of(self, layer: int) -> Block:
        """Where the norms of layer number `layer` are."""
        return self.block if self.layer_blocks is None else self.layer_blocks[layer]

    @property
    def blocks(self) -> set[str]:
        """Where the norms of any layer are."""
        return {self.block_of(layer) for layer in range(self.num_layers)}

    def norms_before(self, layer: int) -> bool:
        """Whether the sublayers of layer number `layer` each have a norm before them."""
        return self.block_of(layer) not in ("post", "parallel_shared_norm")

    def norms_after(self, layer: int) -> bool:
        """Whether the sublayers of layer number `layer` have norms after them."""
        return self.block_of(layer) in ("post", "sandwich")

    def has_input_layernorm(self, layer: int) -> bool:
        """Whether the norm before the mixers of layer number `layer` is a separate module, because more than one
        projection reads what it gives."""
        attention = self.attention_of(layer)
        a = attention
        apart = a is not None and (a.has_head_gate or a.index_channels > 0 or a.compressed is not None)
        apart = apart or (a is not None and a.input_multiplier != 1.0)
        several = self.mixer_of(layer) is not None or apart
        several = several or self.deep_norm is not None or self.laurel_rank is not None
        return self.block == "parallel_shared_norm" or (several and self.norms_before(layer))

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer carries a state from token to token, beside or in place of keys and values."""
        return any(mixer.recurrent for mixer in (self.mixers or {}).values())

    @property
    def stream_size(self) -> int:
        """Channels of the residual stream, of all lanes together."""
        lanes = self.hyper_connections or self.alternating_updates
        return self.hidden_size * (1 if lanes is None else lanes.lanes)

    @property
    def embedding_dropout(self) -> float:
        """Probability with which embeddings are dropped in training."""
        p = self.embedding.embedding_dropout
        return self.hidden_dropout if p is None else p

    def layer_type(self, layer: int) -> LayerType:
        """The attention kind of layer number `layer` (from 0)."""
        assert self.layer_types is not None, "filled in by validation"
        return self.layer_types[layer]

    def window_size(self, layer: int) -> int | None:
        """Positions that a query of layer number `layer` sees, its own included; None: all before it."""
        attention = self.attention_of(layer) if self.layer_type(layer).startswith("sliding") else None
        return None if attention is None else attention.window_size

    def chunk_size(self, layer: int) -> int | None:
        """Positions of the chunks that hide each other in layer number `layer`; None: there are no chunks."""
        attention = self.attention_of(layer) if self.layer_type(layer).startswith("chunked") else None
        return None if attention is None else attention.chunk_size

    def rotates(self, layer: int) -> bool:
        """Whether layer number `layer` has position encoding, if layers have."""
        return not self.layer_type(layer).endswith("nope")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has experts."""
        return self.moe is not None and layer in (self.moe.layers or ())

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of layer number `layer`; None where the layer has no position encoding."""
        attention = self.attention_of(layer)
        if self.embedding.position_embedding_type != "rope" or not self.rotates(layer) or attention is None:
            return None
        if attention.rope is not None:
            return attention.rope
        sliding = self.layer_type(layer) == "sliding"
        return self.rope_sliding if sliding and self.rope_sliding is not None else self.rope

    def to_json(self) -> str:
        """Return the configuration as indented JSON with sorted keys; `from_json` restores an equal value."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_catalogue(cls, name: str) -> ModelConfig:
        """Return the configuration of a published model by its name in the catalogue, such as "qwen3-30b-a3b".

        `te-models models` lists the names. Raises CatalogueError, a ValueError, that names the nearest ones.
        """
        catalogue = importlib.import_module("te_models.catalogue")  # when asked for: a leaf imports nothing beside it
        return catalogue.entry(name).read_config()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`; malformed JSON raises ConfigError."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the model configuration is not valid JSON: {error}") from None
        return cls.from_dict(values)
