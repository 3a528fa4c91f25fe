"""gemma3_text: gemma2 with norms of q and k instead of soft-capping, two rotary bases, 5 of 6 layers windowed
(arXiv 2503.19786); gemma3 holds one beside a model that sees images."""

from .base.family import Family
from .base.fields import Fixed, Nullable, Only
from .base.layer_fields import LayerPattern
from .base.names import SANDWICH, Names
from .base.rope import RopePerLayerType
from .base.text_part import TextPart, with_images
from .gemma import gemma_fields
from .gemma2 import GEMMA2_COMMON

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        *gemma_fields(max_positions=131072),
        *GEMMA2_COMMON,
        Fixed("attention.qk_layernorm", "head"),
        LayerPattern(window=4096, period=6, pattern=True),
        Only("attn_logit_softcapping", None),  # a field of the class without effect: no release has a cap
        Nullable("final_logit_softcapping", "embedding.logits_softcap", None),
        # Old files: `rope_theta` and `rope_scaling` (linear, 8 from 4B on) belong to the full layers; the others
        # have `rope_local_base_freq` unscaled. So the release (transformers 4.50), the paper, and 5.17, which
        # only overlooks a `rope_scaling` whose kind is called `type`, the older name.
        RopePerLayerType(theta=1e6, sliding_theta=1e4, local="rope_local_base_freq"),
    ),
    names=Names(norms=SANDWICH),
)

_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}

GEMMA3 = with_images("gemma3", "Gemma3ForConditionalGeneration", TextPart((GEMMA3_TEXT,), _SIZES))
