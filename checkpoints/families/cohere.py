"""cohere: attention and MLP side by side behind one LayerNorm, rotation in pairs, scaled logits; on request a LayerNorm
of each head of q and k with one weight per head."""

from __future__ import annotations

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, OwnEntry, Values, read_typed
from .base.names import Names
from .base.rope import Rope


class NormOfEachHead(OwnEntry):
    """`use_qk_norm`: a norm of each head of q and k with one weight per head; null means none."""

    names = ("use_qk_norm",)

    def read(self, hf: HFConfig) -> Values:
        normed = hf.get("use_qk_norm") is not None and read_typed(hf, "use_qk_norm", bool, False)
        return {"attention.qk_layernorm": "each_head" if normed else "none"}

    def write(self, config: ModelConfig) -> Values:
        return {"use_qk_norm": config.attention.qk_layernorm == "each_head"}


COHERE_COMMON = (
    *layer_norm_entries(bias=False),
    Fixed("block", "parallel_shared_norm"),
    ATTENTION_BIAS,
    Field("logit_scale", "embedding.logits_multiplier", float, 0.0625),
    Fixed("rope.style", "interleaved"),
)

COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    fields=(
        *decoder_fields(max_positions=8192, pad=0, norm_eps=1e-5, norm_name="layer_norm_eps", tied=True),
        *COHERE_COMMON,
        NormOfEachHead(),
        Rope(theta=5e5),
    ),
    names=Names(norms=("input_layernorm", None, None, None)),
)
