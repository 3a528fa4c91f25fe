"""axk1: deepseek_v3 with a norm after the experts, in layers that have them."""

from dataclasses import replace

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import Fixed, HFConfig, Only, OwnEntry, Values, read_typed
from .base.latent import latent_fields
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, LayerKinds, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused
from .base.rope import Rope
from .base.unused import Unused
from .deepseek_v2 import latent_decoder
from .deepseek_v3 import ROPE_INTERLEAVE
from .glm4_moe import SIGMOID_NAMES


class SelectionBias(OwnEntry):
    """`topk_method`: the router has a bias for the choice where it is "noaux_tc", or absent as in transformers' files;
    the release says otherwise and has no such tensors."""

    names = ("topk_method",)

    def read(self, hf: HFConfig) -> Values:
        return {"moe.router.expert_bias": read_typed(hf, "topk_method", str, "noaux_tc") == "noaux_tc"}

    def write(self, config: ModelConfig) -> Values:
        biased = config.moe is not None and config.moe.router.expert_bias
        return {"topk_method": "noaux_tc" if biased else "greedy"}


_FORM = replace(SIGMOID_NAMES, norms=("input_layernorm", None, "post_attention_layernorm", "post_mlp_layernorm"))
_IN_MEMORY = replace(_FORM, norms=(*_FORM.norms[:3], "mlp.post_mlp_layernorm"))

AXK1 = Family(
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    fields=(
        *latent_decoder(max_positions=32768),
        *latent_fields(query_rank=1536, rope=Rope()),
        ATTENTION_BIAS,
        ROPE_INTERLEAVE,
        *expert_sizes(ROUTED_EXPERTS, 192, 8, width=2048),
        SharedExpertCount("n_shared_experts", 1, default_size=2048),
        LayerKinds(),
        Only("scoring_func", "sigmoid"),
        *sigmoid_router(default_scale=2.5),
        SelectionBias(),
        Fixed("moe.post_layernorm", True),
        ExpertGroups(8, 4),
    ),
    names=_FORM,
    other_names=(replace(_IN_MEMORY, form="fused", experts=Fused()),),
    unused=Unused(("*.rotary_emb.inv_freq", "model.layers.*.post_mlp_layernorm.weight")),
)
