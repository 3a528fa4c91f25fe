"""glm5_next (GLM-5 Flash): the gated delta rule with a decay for each channel, latent attention without positions to
pools of tokens that an indexer chooses, a residual stream of several lanes; beside a model that sees images."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS, SILU
from .base.delta_names import SeparateDeltaNames
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Only, Values, read_typed
from .base.indexer import SHARED, IndexerTypes, indexer_fields
from .base.latent import latent_fields
from .base.moe_fields import ExpertGroups, LayerKinds, RouterLoss, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused, Names
from .base.recurrent import MixerField, Nested
from .base.text_part import TextPart
from .base.unused import Unused
from .deepseek_v2 import latent_decoder
from .kimi_linear import BY_CHANNEL, DELTA_CHANNELS, DELTA_HEADS, LATENTS, Alike, KimiLayers


@dataclass(frozen=True)
class LowerBound(MixerField):
    """`linear_lower_bound`: the log of the decay lies between it and 0; null means that there is no bound, except with
    `safe_gate` in `linear_attn_config`, where it means the class's."""

    hf: str = "linear_lower_bound"
    name: str = "decay_lower_bound"
    kind: type = float
    default: Any = -5.0

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        inner = hf.get("linear_attn_config")
        bound = None if hf.get(self.hf, self.default) is None else read_typed(hf, self.hf, float, self.default)
        safe = isinstance(inner, dict) and read_typed(inner, "safe_gate", bool, True)
        return {self.name: self.default if bound is None and safe else bound}


class Glm5Layers(KimiLayers):
    """`layer_types`, and `indexer_types`: whether a layer with attention has an indexer."""

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        found, shared = super().read(hf, nested), IndexerTypes().read(hf, nested)
        kinds = shared.get("layer_mixers")
        if kinds is None:
            return found
        names = found.get("layer_mixers", ["attention"] * len(kinds))
        names = [kind if name == "attention" else name for name, kind in zip(names, kinds, strict=True)]
        if any(a == "gated_delta" and b == SHARED for a, b in itertools.pairwise(names)):
            raise CheckpointError("config.json has a 'shared' one in indexer_types behind a layer without attention")
        attention = {SHARED: shared["mixers"][SHARED]} if SHARED in names else {}
        return found | {"mixers": {**found.get("mixers", {}), **attention} or None, "layer_mixers": names}

    def write(self, config: ModelConfig) -> Values:
        values = super(KimiLayers, self).write(config)
        shares = [(a := config.attention_of(i)) is not None and not a.index_channels for i in range(config.num_layers)]
        return values | {"indexer_types": [SHARED if share else "full" for share in shares]}


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    return ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]


_AT = "model.language_model."
_FORM = Names(
    embedding=f"{_AT}embed_tokens",
    final_norm=f"{_AT}norm",
    layer=f"{_AT}layers.{{i}}",
    selection_bias="mlp.gate.e_score_correction_bias",
    mixers={"gated_delta": SeparateDeltaNames()},
)
_IN_MEMORY = replace(
    _FORM,
    form="fused",
    experts=Fused(),
    hyper_connection="{sublayer}_hc.{part}",
    mixers={"gated_delta": SeparateDeltaNames(convolution="joined", forget="forget_gate.")},
)

GLM5_NEXT_TEXT = Family(
    model_type="glm5_next_text",
    architecture="Glm5NextForConditionalGeneration",
    fields=(
        *latent_decoder(max_positions=1048576, norm_eps=1e-5, pad=154820, activations=SILU),
        *latent_fields(query_rank=1536, nope=256, value=256, rope=None, rotated=0),
        Field("rms_norm_eps", "attention.mla.latent_norm_epsilon", float, 1e-5),
        ATTENTION_BIAS,
        Fixed("embedding.position_embedding_type", "none", ("head_dim", "index_kpool_always_select_tail")),
        *indexer_fields(heads=32, rope_style="half", rotated="none"),
        Field("index_kpool", "attention.indexer.pool_size", int, 16),
        Only("index_kpool_always_select_tail", True),
        Field("hc_mult", "hyper_connections.lanes", int, 4),
        Field("hc_sinkhorn_iters", "hyper_connections.sinkhorn_iterations", int, 20),
        Field("hc_eps", "hyper_connections.epsilon", float, 1e-6),
        Fixed("hyper_connections.output", "mean"),
        Field("swiglu_limit", "mlp.clamp", float, 10.0),
        *expert_sizes(("n_routed_experts", "num_local_experts"), 288, 8, width=2048),
        SharedExpertCount("n_shared_experts", 1, default_size=2048),
        LayerKinds(dense=3),
        *sigmoid_router(default_scale=2.5),
        ExpertGroups(),
        RouterLoss(),
    ),
    mixers=Glm5Layers(
        kind="gated_delta",
        parts=(
            Alike("linear_num_heads", "num_key_heads", int, 64, DELTA_HEADS),
            Alike("linear_head_dim", "key_head_dim", int, 128, (*DELTA_CHANNELS, *LATENTS)),
            MixerField("linear_conv_kernel_dim", "conv_kernel_size", int, 4),
            LowerBound(),
        ),
        fixed=BY_CHANNEL,
        attention=("indexed_attention", "full_attention"),
        pattern=_pattern,
        extra=("linear_attn_config", "indexer_types"),
    ),
    names=_FORM,
    other_names=(_IN_MEMORY,),
)

GLM5_NEXT = Family(
    model_type="glm5_next",
    architecture="Glm5NextForConditionalGeneration",
    fields=(TextPart((GLM5_NEXT_TEXT,), flat=True),),
    names=_FORM,
    other_names=(_IN_MEMORY,),
    unused=Unused(("*.rotary_emb.inv_freq", f"{_AT}layers.*.shared_head.*"), beside=("model.visual.*",)),
    keeps_dtype=("*.router.expert_bias", "*.mixer.conv_weight", "*.mixer.dt_bias", "*.mixer.A_log"),
)
