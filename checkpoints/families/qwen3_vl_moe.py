"""qwen3_vl_moe: a qwen3_moe beside a model that sees images (arXiv 2511.21631), whose published experts are fused and
stored [in, out]; the positions of a text are qwen3_moe's."""

from dataclasses import replace

from .base.fields import OneOf, Only
from .base.names import Fused, per_expert
from .base.text_part import TextPart, with_images
from .qwen3_moe import QWEN3_MOE

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "rope_theta": 5e5,
}
_PUBLISHED = replace(QWEN3_MOE.names, experts=Fused(transposed=True))
_TEXT = replace(
    QWEN3_MOE,
    fields=(
        *(entry for entry in QWEN3_MOE.fields if not {"norm_topk_prob", "num_experts"} & set(entry.names)),
        OneOf(("num_experts", "num_local_experts"), "moe.num_moe_experts", int, 60),
        Only("norm_topk_prob", True),  # transformers does not read it: the scores always add up to 1
    ),
    names=_PUBLISHED,
    other_names=(replace(_PUBLISHED, form="fused", experts=Fused()), per_expert(_PUBLISHED, "mlp.experts")),
)

QWEN3_VL_MOE = with_images(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    TextPart((_TEXT,), _DEFAULTS, kind="qwen3_vl_moe_text"),
    prefix=None,
)
