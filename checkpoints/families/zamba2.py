"""zamba2: Mamba-2 in every layer, and before it in some a block of attention and an MLP, whose weights these layers
share (arXiv 2411.15242)."""

from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed, HFConfig, Only, OwnEntry, Spread, Values, read_typed, shorten_value, switch
from .base.names import Names, SharedNames
from .base.recurrent import Mamba2Names, MixerField, Nested, RecurrentLayers
from .base.rope import Rope

_WORDS = {"linear_attention": "linear_attention", "mamba": "linear_attention", "hybrid": "hybrid"}


_DEFAULT = ["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "linear_attention" for i in range(54)]
"""The layers of a file that does not say."""


def _derived(hf: HFConfig, name: str, value: int) -> int:
    """Return a size that follows from others, with which a file that says it has to agree."""
    if hf.get(name, value) != value:
        raise CheckpointError(f"config.json has {name} = {shorten_value(hf[name])}; allowed: {value}, by other fields")
    return value


class WideAttention(OwnEntry):
    """The attention of shared blocks: heads over 2 hidden_size channels, scores by the root of half a head."""

    names = ("attention_head_dim", "attention_hidden_size", "num_query_groups", "kv_channels")

    def read(self, hf: HFConfig) -> Values:
        hidden, heads = read_typed(hf, "hidden_size", int, 2560), read_typed(hf, "num_attention_heads", int, 32)
        channels = _derived(hf, "attention_head_dim", 2 * hidden // max(heads, 1))
        _derived(hf, "attention_hidden_size", 2 * hidden)
        return {"attention.kv_channels": channels, "attention.softmax_scale": (channels / 2) ** -0.5}


class WidthOrFourfold(OwnEntry):
    """`intermediate_size`; 0 or null means four times hidden_size."""

    names = ("intermediate_size",)

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, "intermediate_size", int, None)
        return {"mlp.ffn_hidden_size": size or 4 * read_typed(hf, "hidden_size", int, 2560)}

    def write(self, config: ModelConfig) -> Values:
        return {"intermediate_size": config.mlp.ffn_hidden_size}


@dataclass(frozen=True)
class SizeByHeads(MixerField):
    """`mamba_expand` times hidden_size: the channels of all heads."""

    hf: str = "mamba_expand"
    name: str = "head_dim"
    kind: type = int

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        size = read_typed(hf, "mamba_expand", int, 2) * nested["hidden_size"]
        heads = read_typed(hf, "n_mamba_heads", int, 8)
        if heads < 1 or size % heads:
            raise CheckpointError(f"config.json has n_mamba_heads = {heads}; allowed: a divisor of {size} channels")
        return {"head_dim": _derived(hf, "mamba_headdim", size // heads)}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {"mamba_expand": mixer.size // config.hidden_size}


class SharedLayers(RecurrentLayers):
    """`layers_block_type`: "hybrid" for layers that use a shared block."""

    @property
    def names(self) -> tuple[str, ...]:
        own = ("num_mem_blocks", "adapter_rank", "use_shared_attention_adapter", "hybrid_layer_ids", "mamba_headdim")
        return ("layers_block_type", *own, *super().names)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        layers, words = nested["num_layers"], read_typed(hf, "layers_block_type", list, None)
        words = _DEFAULT if words is None else words
        if len(words) != layers or not all(word in _WORDS for word in words):
            raise CheckpointError(
                f"config.json has layers_block_type = {shorten_value(words)} and {layers} layers; allowed for each: "
                f"{', '.join(map(repr, _WORDS))}"
            )
        uses = [i for i, word in enumerate(words) if _WORDS[word] == "hybrid"]
        found: Values = {
            "mixers": {self.kind: self.mixer(hf, nested)},
            "layer_mixers": [f"attention+{self.kind}" if i in uses else self.kind for i in range(layers)],
            "mlp_layers": [],
        }
        if not uses:
            return found
        return found | {
            "shared_blocks": {
                "num_blocks": min(read_typed(hf, "num_mem_blocks", int, 1), len(uses)),
                "layers": uses,
                "lora_rank": read_typed(hf, "adapter_rank", int, 128),
                "attention_lora": read_typed(hf, "use_shared_attention_adapter", bool, False),
            }
        }

    def write(self, config: ModelConfig) -> Values:
        shared, mixer = config.shared_blocks, (config.mixers or {}).get(self.kind)
        uses = () if shared is None else shared.layers
        values: Values = {"layers_block_type": ["hybrid" if i in uses else "mamba" for i in range(config.num_layers)]}
        if shared is not None:
            values |= {"num_mem_blocks": shared.num_blocks, "adapter_rank": shared.lora_rank}
            values |= {"use_shared_attention_adapter": shared.attention_lora}
        for part in () if mixer is None or mixer.kind != self.kind else self.parts:
            values |= part.write(mixer, config)
        return values


ZAMBA2 = Family(
    model_type="zamba2",
    fields=(
        *decoder_fields(
            max_positions=4096,
            norm_eps=1e-5,
            activation="gelu",
            pad=0,
            without=("intermediate_size", "head_dim", "tie_word_embeddings"),
        ),
        Only("tie_word_embeddings", True),  # with false, transformers shares no block either
        Fixed("embedding.share_embeddings_and_output_weights", True),
        WidthOrFourfold(),
        WideAttention(),
        switch("use_mem_rope", "embedding.position_embedding_type", "rope", "none"),  # of shared blocks
        Only("use_long_context", False),
        Spread("add_bias_linear", ("mlp.bias",)),
        Rope(),
    ),
    mixers=SharedLayers(
        kind="mamba2",
        parts=(
            MixerField("n_mamba_heads", "num_heads", int, 8),
            SizeByHeads(),
            MixerField("mamba_d_state", "state_size", int, 64),
            MixerField("mamba_ngroups", "num_groups", int, 1),
            MixerField("mamba_d_conv", "conv_kernel_size", int, 4),
            MixerField("add_bias_linear", "use_bias", bool, False),
            MixerField("time_step_min", "time_step_low", float, 1e-3),
        ),
        fixed={"norm_epsilon": 1e-5},
    ),
    names=Names(
        final_norm="model.final_layernorm",
        fc1=("feed_forward.gate_up_proj",),
        fc2="feed_forward.down_proj",
        mixers={"mamba2": Mamba2Names()},
        shared=SharedNames(),
    ),
)
