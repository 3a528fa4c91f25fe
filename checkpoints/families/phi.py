"""phi: attention and MLP side by side behind one LayerNorm, biases everywhere, partial rotation (arXiv 2306.11644)."""

from .base.common import Dropouts, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Flag, fixed
from .base.names import Names
from .base.rope import Rope

QK_LAYERNORM = Flag(
    "qk_layernorm",
    (("attention.qk_layernorm", "head"), ("attention.qk_layernorm_bias", True)),
    (("attention.qk_layernorm", "none"), ("attention.qk_layernorm_bias", False)),
)
"""A LayerNorm with bias of each head of q and k."""

PHI = Family(
    model_type="phi",
    fields=(
        *decoder_fields(max_positions=2048, norm_eps=1e-5, norm_name="layer_norm_eps", activation="gelu_new"),
        *layer_norm_entries(bias=True),
        Dropouts("resid_pdrop", "embd_pdrop"),
        *fixed({"block": "parallel_shared_norm", "mlp.gated": False, "mlp.bias": True, "attention.add_qkv_bias": True}),
        *fixed({"attention.add_output_bias": True, "embedding.output_bias": True}),
        QK_LAYERNORM,
        Rope(partial=0.5),
    ),
    names=Names(
        final_norm="model.final_layernorm",
        norms=("input_layernorm", None, None, None),
        qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        proj="self_attn.dense",
        fc1=("mlp.fc1",),
        fc2="mlp.fc2",
    ),
)
