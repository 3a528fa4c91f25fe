"""hunyuan_v1_dense: hunyuan_v1_moe without experts."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Only, fixed
from .base.names import Names
from .base.rope import Rope
from .hunyuan_v1_moe import IGNORED_IN_ROPE, QK_NORMS, SwitchedOff

HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    fields=(
        *decoder_fields(max_positions=2048, pad=0, norm_eps=1e-5),
        ATTENTION_BIAS,
        Only("use_qk_norm", True),
        SwitchedOff(("use_cla", "use_mla", "use_mixed_mlp_moe")),
        *fixed({"attention.qk_layernorm": "head", "attention.qk_layernorm_after_rope": True}),
        Rope(alpha=True, extra=IGNORED_IN_ROPE),
    ),
    names=Names(qk_norms=QK_NORMS),
)
