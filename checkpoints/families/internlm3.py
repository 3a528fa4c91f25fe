"""internlm3: llama with one flag for all biases; the flag has two names in published files."""

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import HFConfig, OwnEntry, Values, read_typed
from .base.rope import Rope

_PATHS = ("attention.add_qkv_bias", "attention.add_output_bias", "mlp.bias")


class Biases(OwnEntry):
    """`qkv_bias` and `bias`. transformers writes them as `attention_bias` and `mlp_bias` and computes only where they
    are the same."""

    names = ("qkv_bias", "bias", "attention_bias", "mlp_bias")

    def read(self, hf: HFConfig) -> Values:
        found = {name: read_typed(hf, name, bool, False) for name in self.names if name in hf}
        complete = {"qkv_bias", "attention_bias"} & set(found) and {"bias", "mlp_bias"} & set(found)
        values = set(found.values()) | (set() if complete else {False})
        if len(values) > 1:
            said = " and ".join(f"{name} = {value}" for name, value in found.items())
            raise CheckpointError(f"config.json has {said}; supported: the same value of qkv_bias and bias")
        return dict.fromkeys(_PATHS, values.pop())

    def write(self, config: ModelConfig) -> Values:
        return dict.fromkeys(("qkv_bias", "bias"), config.mlp.bias)


INTERNLM3 = Family(
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    fields=(*decoder_fields(max_positions=32768, norm_eps=1e-5, kv_heads=2, head_dim=128, pad=2), Biases(), Rope()),
)
