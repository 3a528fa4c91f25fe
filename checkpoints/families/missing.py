"""Model types of transformers that are not supported, by the element of their layers that is missing."""

MISSING: dict[str, str] = {
    "blocks shared between layers": "zamba",
    "sparse attention beside gates, other latents or keys of earlier layers": (
        "axk2 hy_v4 dots3_note dots3_note_text mistral_large4 mistral_large4_text"
    ),
    "sparse attention by blocks": "minimax_m3_vl minimax_m3_vl_text minimax_m3 qwen4_exp qwen4_exp_text",
    "two attentions and two MLPs in a layer, and experts that compute nothing": "longcat_flash",
    "convolutions on keys and values": "inkling_mm_model inkling_text inkling2 inkling2_text zaya",
    "RG-LRU": "recurrent_gemma",
    "mLSTM": "xlstm",
    "WKV": "rwkv",
    "a sparsemixer router, whose choice in training is drawn at random": "phimoe",
    "experts of queries and of the output projection": "jetmoe",
    "masks that are computed from values": "doge",
    "output gates with a bias of each head, and residual factors by depth": "beam",
    "learned gates of residual connections": "muse_spark muse_spark_text",
    "norms of several kinds in one layer, and normed queries times a factor": "muse_glimmer muse_glimmer_text",
    "activations that are clamped in some layers, behind SiLU": "step3p7 step3p5",
    "adapters of single modalities within the text model": "phi4_multimodal",
    "ternary weights": "bitnet",
    "differential attention": "diffllama",
}
"""Element -> the model types whose layers need it."""


def missing_element(model_type: str) -> str | None:
    """Return the element that layers of a model type need and te_models lacks; None where that is not known."""
    return next((element for element, types in MISSING.items() if model_type in types.split()), None)
