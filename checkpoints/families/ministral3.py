"""ministral3: mistral with yarn and queries scaled by the logarithm of their position."""

from dataclasses import dataclass

from te_models.config import ModelConfig

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, HFConfig, Values, read_typed
from .base.layer_fields import AllLayersWindow
from .base.rope import AroundRope, Rope

_DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


_ROPE = Rope(extra=("llama_4_scaling_beta", "max_position_embeddings"))


@dataclass(frozen=True)
class ScaledQueries(AroundRope):
    """`rope_parameters`, with `llama_4_scaling_beta` and the length by which positions are divided."""

    rope: Rope = _ROPE

    def read(self, hf: HFConfig) -> Values:
        values = hf.get("rope_scaling") or hf.get("rope_parameters") or _DEFAULT
        result = self.rope.read({**hf, "rope_scaling": values})
        result["attention.temperature_tuning.attn_scale"] = read_typed(values, "llama_4_scaling_beta", float, REQUIRED)
        length = result.get("rope.original_max_position_embeddings")  # of a field outside, where there is one
        length = length or read_typed(values, "original_max_position_embeddings", int, REQUIRED)
        return result | {"attention.temperature_tuning.floor_scale": float(length)}

    def write(self, config: ModelConfig) -> Values:
        values, tuning = self.rope.rope_values(config.rope), config.attention.temperature_tuning
        if tuning is not None:
            values |= {
                "llama_4_scaling_beta": tuning.attn_scale,
                "original_max_position_embeddings": int(tuning.floor_scale),
            }
        return {"rope_parameters": values}


MINISTRAL3 = Family(
    model_type="ministral3",
    fields=(
        *decoder_fields(max_positions=262144, pad=11, norm_eps=1e-5, kv_heads=8, head_dim=128),
        AllLayersWindow(default=None),
        ScaledQueries(),
    ),
)
