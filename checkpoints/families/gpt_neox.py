"""gpt_neox: attention and MLP side by side with a LayerNorm each, a quarter of each head rotated (arXiv 2204.06745)."""

from dataclasses import dataclass, replace

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import REQUIRED, Field, HFConfig, OwnEntry, Values, fixed, read_typed, switch
from .base.names import Names
from .base.rope import AroundRope, Rope
from .base.unused import Unused


class SameHeadDim(OwnEntry):
    """`head_dim`, a field that transformers' class does not have: its rotation takes it all the same, and its heads do
    not. Null, or what the heads have."""

    names = ("head_dim",)

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, "head_dim", int, None)
        whole, heads = (read_typed(hf, name, int, REQUIRED) for name in ("hidden_size", "num_attention_heads"))
        if size and heads > 0 and size != whole // heads:
            raise CheckpointError(
                f"config.json has head_dim = {size}, which this family does not have; supported: null or "
                f"{whole // heads}, hidden_size / num_attention_heads"
            )
        return {}


_ROPE = Rope(partial=0.25)


@dataclass(frozen=True)
class NeoXRope(AroundRope):
    """The rotary embedding, whose base and fraction older files call `rotary_emb_base` and `rotary_pct`; these win."""

    rope: Rope = _ROPE
    names: tuple[str, ...] = (*Rope.names, "rotary_emb_base", "rotary_pct")

    def read(self, hf: HFConfig) -> Values:
        older = {"rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct")}
        return self.rope.read({**hf, **{k: v for k, v in older.items() if v is not None}})


_FORM = Names(
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    output="embed_out",
    layer="gpt_neox.layers.{i}",
    qkv=("attention.query_key_value",),
    heads_in_turn=True,
    proj="attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields=(
        *decoder_fields(
            max_positions=2048,
            norm_eps=1e-5,
            norm_name="layer_norm_eps",
            activation="gelu",
            without=("head_dim", "num_key_value_heads", "pad_token_id"),
        ),
        SameHeadDim(),
        *layer_norm_entries(bias=True),
        replace(ATTENTION_BIAS, default=True),
        Field("hidden_dropout", "hidden_dropout", float, 0.0),
        *fixed({"mlp.gated": False, "mlp.bias": True}),
        switch("use_parallel_residual", "block", "parallel", "pre", True),
        NeoXRope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="lm_head", output="lm_head"),),
    unused=Unused(("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")),
)
