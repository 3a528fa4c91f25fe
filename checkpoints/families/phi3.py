"""phi3: llama with fused projections and long-context rotary factors (arXiv 2404.14219)."""

from __future__ import annotations

from .common import decoder_fields
from .family import Family
from .fields import Field
from .layer_fields import AllLayersWindow
from .names import Names
from .rope import Rope

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=(
        *decoder_fields(max_positions=4096, norm_eps=1e-5),
        Field("resid_pdrop", "hidden_dropout", float, 0.0),
        AllLayersWindow(default=None),
        Rope(partial=1.0, types=("default", "longrope", "su"), original=4096),
    ),
    names=Names(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",)),
)
