"""cohere: attention and MLP side by side behind one LayerNorm, rotation in pairs, scaled logits; on request a LayerNorm
of each head of q and k with one weight per head."""

from .base.common import ATTENTION_BIAS, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, switch
from .base.names import Names
from .base.rope import Rope

COHERE_COMMON = (
    *layer_norm_entries(bias=False),
    Fixed("block", "parallel_shared_norm"),
    ATTENTION_BIAS,
    Field("logit_scale", "embedding.logits_multiplier", float, 0.0625),
    Fixed("rope.style", "interleaved"),
)

COHERE = Family(
    model_type="cohere",
    fields=(
        *decoder_fields(max_positions=8192, pad=0, norm_eps=1e-5, norm_name="layer_norm_eps", tied=True),
        *COHERE_COMMON,
        switch("use_qk_norm", "attention.qk_layernorm", "each_head", "none", null=True),
        Rope(theta=5e5),
    ),
    names=Names(norms=("input_layernorm", None, None, None)),
)
