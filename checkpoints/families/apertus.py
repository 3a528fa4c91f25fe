"""apertus: llama with norms of q and k, and MLPs without gate whose activation, xIELU (arXiv 2411.13010), has two
learned and two stored numbers (arXiv 2509.14233)."""

from .base.common import ACTIVATIONS, ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import fixed
from .base.names import Names
from .base.rope import Rope

APERTUS = Family(
    model_type="apertus",
    fields=(
        *decoder_fields(
            max_positions=65536, norm_eps=1e-5, activation="xielu", activations={"xielu": "xielu", **ACTIVATIONS}, pad=3
        ),
        *fixed({"attention.qk_layernorm": "head", "mlp.gated": False}),
        ATTENTION_BIAS,
        Rope(
            theta=12e6,
            default={
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ),
    names=Names(norms=("attention_layernorm", None, "feedforward_layernorm", None), fc1=("mlp.up_proj",)),
)
