"""Model types of transformers that are not supported, by the element of their layers that is missing."""

from __future__ import annotations

MISSING: dict[str, str] = {
    "blocks shared between layers": "zamba",
    "gated short convolutions": "lfm3",
    "sparse attention beside gates, other latents or keys of earlier layers": "axk2 hy_v4 dots3_note mistral_large4",
    "sparse attention by blocks": "minimax_m3 minimax_m3_vl_text qwen4_exp qwen4_exp_text",
    "two attentions and two MLPs in a layer": "longcat_flash",
    "convolutions on keys and values": "inkling inkling2 zaya",
    "RG-LRU": "recurrent_gemma",
    "mLSTM": "xlstm",
    "WKV": "rwkv",
    "ALiBi": "bloom mpt falcon",
    "a sparsemixer router": "phimoe",
    "xIELU": "apertus",
    "ternary weights": "bitnet",
    "differential attention": "diffllama",
}
"""Element -> the model types whose layers need it."""


def missing_element(model_type: str) -> str | None:
    """Return the element that layers of a model type need and te_models lacks; None where that is not known."""
    return next((element for element, types in MISSING.items() if model_type in types.split()), None)
