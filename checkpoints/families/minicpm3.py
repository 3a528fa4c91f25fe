"""minicpm3: latent attention with dense MLPs; scaled embeddings, residual connections and logits (arXiv 2404.06395)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import Field, HFConfig, OfOneField, OwnEntry, Values, get_path, read_typed
from .base.latent import latent_fields
from .base.rope import Rope
from .deepseek_v2 import latent_decoder


@dataclass(frozen=True)
class BySize(OfOneField):
    """A number by which a factor of the model is a function of one of its sizes; null means a factor of 1."""

    path: str
    default: float
    size: str
    ours: str
    factor: Callable[[float, int], float]
    inverse: Callable[[float, int], float]
    whole: bool = False

    def read(self, hf: HFConfig) -> Values:
        value = hf.get(self.hf, self.default)
        if value is None:
            return {}
        number, size = read_typed({self.hf: value}, self.hf, float, 1.0), read_typed(hf, self.size, int, 1)
        if not number > 0 or size < 1:
            raise CheckpointError(f"config.json has {self.hf} = {value}; allowed: a positive number, or null")
        return {self.path: self.factor(number, size)}

    def write(self, config: ModelConfig) -> Values:
        ours, size = get_path(config, self.path), get_path(config, self.ours)
        value = self.inverse(ours, size)
        near = (float(f"{value:.12g}"), value, math.nextafter(value, 0), math.nextafter(value, math.inf))
        value = next((x for x in near if self.factor(x, size) == ours), value)
        return {self.hf: int(value) if self.whole and value.is_integer() else value}


class ValueHeadDim(OwnEntry):
    """`v_head_dim`; null means hidden_size by the heads."""

    names = ("v_head_dim",)

    def read(self, hf: HFConfig) -> Values:
        heads = read_typed(hf, "num_attention_heads", int, 40)
        usual = read_typed(hf, "hidden_size", int, 2560) // max(heads, 1)
        return {"attention.mla.v_head_dim": read_typed(hf, "v_head_dim", int, None) or usual}

    def write(self, config: ModelConfig) -> Values:
        mla = config.attention.mla
        return {} if mla is None else {"v_head_dim": mla.v_head_dim}


_LATENT = latent_fields(query_rank=768, rank=256, nope=64, rotated=32, rope=Rope())
MINICPM3 = Family(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    fields=(
        *latent_decoder(max_positions=32768, norm_eps=1e-5, tied=True, init_std=0.1),
        *(entry for entry in _LATENT if "v_head_dim" not in entry.names),
        ValueHeadDim(),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        Field("scale_emb", "embedding.multiplier", float, 12.0),
        BySize(
            "scale_depth",
            "residual_multiplier",
            1.4,
            "num_hidden_layers",
            "num_layers",
            lambda x, layers: x / math.sqrt(layers),
            lambda x, layers: x * math.sqrt(layers),
        ),
        BySize(
            "dim_model_base",
            "embedding.logits_multiplier",
            256.0,
            "hidden_size",
            "hidden_size",
            lambda x, hidden: x / hidden,
            lambda x, hidden: x * hidden,
            whole=True,
        ),
    ),
)
