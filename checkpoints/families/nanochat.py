"""nanochat: norms without weights, also of the embeddings and, behind the rotation, of q and k; squared ReLU without
gate; a rotation that turns the other way: the usual rotation for heads whose halves are swapped."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed, Nullable, fixed
from .base.names import Names
from .base.rope import Rope

NANOCHAT = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    fields=(
        *decoder_fields(max_positions=2048, norm_eps=1e-6, activation="relu2", pad=1),
        *fixed({"norm.has_weight": False, "embedding.layernorm": True, "attention.qk_layernorm": "l2"}),
        Fixed("mlp.gated", False),
        ATTENTION_BIAS,
        Nullable("final_logit_softcapping", "embedding.logits_softcap", 15.0),
        Rope(),
    ),
    names=Names(fc1=("mlp.fc1",), fc2="mlp.fc2", halves_swapped=True),
)
