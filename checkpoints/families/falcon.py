"""falcon: attention and MLP side by side behind one LayerNorm or two, few heads of keys, q, k and v by head of keys
(arXiv 2311.16867). Not the models with ALiBi, whose biases are rounded to bfloat16 and then scaled as scores."""

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ACTIVATIONS, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import REQUIRED, Choice, Fixed, HFConfig, Only, OwnEntry, Spread, Values, read_typed
from .base.names import Names
from .base.nested import TimesHidden
from .base.rope import Rope
from .gpt_neox import SameHeadDim


class FalconBlocks(OwnEntry):
    """`new_decoder_architecture` with `num_kv_heads` and `num_ln_in_parallel_attn` (null: 2); or without it
    `multi_query`, one head of keys, and `parallel_attn`, one norm for attention and MLP."""

    names = ("new_decoder_architecture", "multi_query", "num_kv_heads", "parallel_attn", "num_ln_in_parallel_attn")

    def read(self, hf: HFConfig) -> Values:
        new = read_typed(hf, "new_decoder_architecture", bool, False)
        one, parallel = (read_typed(hf, name, bool, True) for name in ("multi_query", "parallel_attn"))
        heads = read_typed(hf, "num_attention_heads", int, REQUIRED)
        groups = read_typed(hf, "num_kv_heads", int, None) or heads
        norms = read_typed(hf, "num_ln_in_parallel_attn", int, None) or (2 if new else 1)
        if not 1 <= norms <= 1 + new or (new and not parallel):
            raise CheckpointError(
                f"config.json has num_ln_in_parallel_attn = {norms} and parallel_attn = {parallel}; supported: 1, or "
                "1 and 2 with new_decoder_architecture, and then true"
            )
        if not new and not one and groups != heads:
            raise CheckpointError(f"config.json has num_kv_heads = {groups}; supported: {heads}, without multi_query")
        block = ("parallel_shared_norm", "parallel")[norms - 1] if parallel else "pre"
        return {"attention.num_query_groups": groups if new or not one else 1, "block": block}

    def write(self, config: ModelConfig) -> Values:
        groups, new = config.attention.num_query_groups, config.block == "parallel"
        heads = config.attention.num_attention_heads
        new = new or groups not in (1, heads)
        return {
            "new_decoder_architecture": new,
            "multi_query": new or groups == 1,
            "num_kv_heads": groups if new else heads,
            "parallel_attn": config.block != "pre",
            "num_ln_in_parallel_attn": (2 if config.block == "parallel" else 1) if new else None,
        }


FALCON = Family(
    model_type="falcon",
    fields=(
        *decoder_fields(
            max_positions=2048,
            norm_eps=1e-5,
            norm_name="layer_norm_epsilon",
            tied=True,
            without=(
                *("intermediate_size", "head_dim", "num_key_value_heads", "hidden_act", "attention_dropout"),
                "pad_token_id",
            ),
        ),
        SameHeadDim(),
        TimesHidden("ffn_hidden_size"),
        Choice("activation", "mlp.activation", ACTIVATIONS, "gelu"),
        *layer_norm_entries(bias=True),
        Fixed("mlp.gated", False),
        Spread("bias", ("mlp.bias", "attention.add_qkv_bias", "attention.add_output_bias")),
        FalconBlocks(),
        Only("hidden_dropout", 0.0, null=True),
        Only("attention_dropout", 0.0, null=True),
        Only("alibi", False, null=True),
        Rope(),
    ),
    names=Names(
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        layer="transformer.h.{i}",
        parallel_norms=("ln_attn", None, "ln_mlp", None),
        qkv=("self_attention.query_key_value",),
        heads_in_turn=True,
        proj="self_attention.dense",
        fc1=("mlp.dense_h_to_4h",),
        fc2="mlp.dense_4h_to_h",
    ),
)
