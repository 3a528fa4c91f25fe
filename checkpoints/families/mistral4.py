"""mistral4: deepseek_v3 with a softmax router, and queries scaled by the logarithm of their position."""

from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Values
from .base.latent import latent_fields
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, FirstDense, SharedExpertCount, expert_sizes
from .base.names import Fused, Names, per_expert
from .deepseek_v2 import latent_decoder
from .deepseek_v3 import ROPE_INTERLEAVE
from .ministral3 import ScaledQueries

_DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class LatentQueries(ScaledQueries):
    """As of ministral3. `partial_rotary_factor` says which part of a head the rotated channels are, as their number
    does, and is left out."""

    def read(self, hf: HFConfig) -> Values:
        values = hf.get("rope_scaling") or hf.get("rope_parameters") or _DEFAULT
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if name != "partial_rotary_factor"}
        return super().read({**hf, "rope_scaling": values})


FUSED = Names(experts=Fused())

MISTRAL4 = Family(
    model_type="mistral4",
    fields=(
        *latent_decoder(max_positions=1048576, pad=11),
        *latent_fields(query_rank=1024, rank=256, nope=64, rope=LatentQueries()),
        ATTENTION_BIAS,
        ROPE_INTERLEAVE,
        *expert_sizes(ROUTED_EXPERTS, 128, 4, width=2048),
        SharedExpertCount("n_shared_experts", 1, default_size=2048),
        FirstDense(0),
        Fixed("moe.router.normalize_eps", 1e-20),
        Field("norm_topk_prob", "moe.router.normalize", bool, True),
        Field("routed_scaling_factor", "moe.router.scaling_factor", float, 1.0),
        ExpertGroups(1, 1),
    ),
    names=FUSED,
    other_names=(per_expert(FUSED, "mlp.experts"),),
)
