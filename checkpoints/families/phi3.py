"""phi3: llama with fused projections and long-context rotary factors (arXiv 2404.14219)."""

from .base.common import Dropouts, decoder_fields
from .base.family import Family
from .base.layer_fields import AllLayersWindow
from .base.names import Names
from .base.rope import Rope

PHI3 = Family(
    model_type="phi3",
    fields=(
        *decoder_fields(max_positions=4096, norm_eps=1e-5, pad=32000),
        Dropouts("resid_pdrop", None),  # transformers has `embd_pdrop` and drops no embeddings
        AllLayersWindow(default=None),
        Rope(partial=1.0, types=("default", "longrope", "su"), original=4096),
    ),
    names=Names(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",)),
)
