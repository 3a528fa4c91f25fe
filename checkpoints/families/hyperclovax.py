"""hyperclovax: granite with norms after each sublayer on request, and logits that are multiplied (arXiv 2506.22403)."""

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, HeadDim, decoder_fields
from .base.family import Family
from .base.fields import Field, HFConfig, OwnEntry, Values, read_typed, switch
from .base.names import Names
from .base.rope import Rope


class AttentionMultiplier(OwnEntry):
    """`attention_multiplier`, the factor of the scores; null means 1 / sqrt(head_dim), as the number itself does."""

    names = ("attention_multiplier",)

    def read(self, hf: HFConfig) -> Values:
        value, size = read_typed(hf, "attention_multiplier", float, None), HeadDim(None).read(hf)
        usual = float(max(size["attention.kv_channels"], 1)) ** -0.5
        return {} if value in (None, usual) else {"attention.softmax_scale": value}

    def write(self, config: ModelConfig) -> Values:
        return {"attention_multiplier": config.attention.softmax_scale}


HYPERCLOVAX = Family(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    fields=(
        *decoder_fields(max_positions=2048),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        switch("use_post_norm", "block", "sandwich", "pre", True),
        Field("embedding_multiplier", "embedding.multiplier", float, 1.0),
        AttentionMultiplier(),
        Field("residual_multiplier", "residual_multiplier", float, 1.0),
        Field("logits_scaling", "embedding.logits_multiplier", float, 1.0),
        Rope(),
    ),
    names=Names(norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")),
)
