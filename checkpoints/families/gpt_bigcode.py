"""gpt_bigcode: gpt2 with one head of keys and values for all queries, and weights stored [out, in] (SantaCoder, arXiv
2301.03988)."""

from dataclasses import replace

from te_models.config import ModelConfig

from .base.common import ACTIVATIONS
from .base.family import Family
from .base.fields import REQUIRED, Choice, Fixed, HFConfig, OwnEntry, Values, read_typed, switch
from .base.unused import Unused
from .gpt2 import GPT2, ScoreScale


class MultiQuery(OwnEntry):
    """`multi_query`: whether all queries share one head of keys and values; else each has its own."""

    names = ("multi_query",)

    def read(self, hf: HFConfig) -> Values:
        heads = read_typed(hf, "n_head" if "n_head" in hf else "num_attention_heads", int, REQUIRED)
        return {"attention.num_query_groups": 1 if read_typed(hf, "multi_query", bool, True) else heads}

    def write(self, config: ModelConfig) -> Values:
        return {"multi_query": config.attention.num_query_groups == 1}


_OF_ROUNDING = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")

GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    fields=(
        *(entry for entry in GPT2.fields if not isinstance(entry, (ScoreScale, Choice))),
        Choice("activation_function", "mlp.activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        switch("scale_attn_weights", "attention.softmax_scale", None, 1.0, True),
        MultiQuery(),
        Fixed("norm.normalization", "LayerNorm", _OF_ROUNDING),
    ),
    names=replace(GPT2.names, transposed=False, heads_in_turn=True),
    unused=Unused(("*.attn.bias", "*.attn.masked_bias")),
)
