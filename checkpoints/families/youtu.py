"""youtu: latent attention with dense MLPs (arXiv 2512.24618)."""

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import REQUIRED, HFConfig, OwnEntry, Values, read_typed
from .base.latent import latent_fields
from .base.rope import Rope
from .deepseek_v2 import latent_decoder
from .deepseek_v3 import ROPE_INTERLEAVE


class InitialStd(OwnEntry):
    """`initializer_range`; where the file does not say, 2 / sqrt(5 hidden_size)."""

    names = ("initializer_range",)

    def read(self, hf: HFConfig) -> Values:
        std, hidden = read_typed(hf, "initializer_range", float, None), read_typed(hf, "hidden_size", int, REQUIRED)
        return {"init_method_std": 2 / (5 * max(hidden, 1)) ** 0.5 if std is None else std}

    def write(self, config: ModelConfig) -> Values:
        return {"initializer_range": config.init_method_std}


YOUTU = Family(
    model_type="youtu",
    fields=(
        *latent_decoder(max_positions=131072, tied=True, without=("initializer_range",)),
        InitialStd(),
        *latent_fields(query_rank=1536, rope=Rope()),
        ATTENTION_BIAS,
        ROPE_INTERLEAVE,
    ),
)
