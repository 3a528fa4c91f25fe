"""dbrx: 16 experts in every layer, clamped q, k and v, LayerNorm without bias (Databricks, 2024).

`attn_config.rope_theta` of published files is the base of the rotation: transformers takes no notice of it.
"""

from dataclasses import dataclass, replace

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from ..mapping.blocks import joined
from ..mapping.layout_ops import Rows, Stack, Transpose
from .base.common import ACTIVATIONS, Dropouts, PaddingIdx, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Nullable, OneOf, Only, OwnEntry, Values, read_typed, shorten_value
from .base.moe_fields import joint_coefficient
from .base.names import Names, PerExpert, Weights
from .base.nested import Repeated, Within
from .base.rope import Rope


@dataclass(frozen=True)
class FlatExperts:
    """All experts of a layer one below the other, gate, up and down apart, each [E * I, H]."""

    at: str = "ffn.experts.mlp."

    def weights(self, config: ModelConfig, ours: str, at: str) -> Weights:
        moe = config.moe
        assert moe is not None, "called for MoE layers only"
        rows, experts = moe.moe_ffn_hidden_size, range(moe.num_moe_experts)
        gate, up, down = (
            [Rows(f"{at}{self.at}{name}", e * rows, len(experts) * rows) for e in experts]
            for name in ("w1", "v1", "w2")
        )
        fc1 = f"{ours}linear_fc1.weight"
        yield fc1, Stack(*(joined(config, fc1, *parts) for parts in zip(gate, up, strict=True)))
        yield f"{ours}linear_fc2.weight", Stack(*map(Transpose, down))


class ExpertActivation(OwnEntry):
    """`ffn_act_fn`, an object with the name; null means silu."""

    names = ("ffn_act_fn",)

    def read(self, hf: HFConfig) -> Values:
        value = hf.get("ffn_act_fn") or {"name": "silu"}
        if not isinstance(value, dict) or set(value) != {"name"} or value["name"] not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json has ffn_act_fn = {shorten_value(value)}; supported: null, or a name of "
                f"{', '.join(ACTIVATIONS)}"
            )
        return {"mlp.activation": ACTIVATIONS[value["name"]]}

    def write(self, config: ModelConfig) -> Values:
        names = [theirs for theirs, ours in ACTIVATIONS.items() if ours == config.mlp.activation]
        return {"ffn_act_fn": {"name": names[0]}} if names else {}


class NoNoise(OwnEntry):
    """`moe_jitter_eps`, by which training multiplies the router's input at random: null or 0."""

    names = ("moe_jitter_eps",)

    def read(self, hf: HFConfig) -> Values:
        if hf.get("moe_jitter_eps"):
            value = shorten_value(hf["moe_jitter_eps"])
            raise CheckpointError(f"config.json has moe_jitter_eps = {value}; supported: null or 0")
        return {}


class NormalizedWeights(OwnEntry):
    """`moe_normalize_expert_weights`: 1, weights divided by their sum; null: as they are."""

    names = ("moe_normalize_expert_weights",)

    def read(self, hf: HFConfig) -> Values:
        power = hf.get("moe_normalize_expert_weights", 1.0)
        if power not in (None, 1):
            raise CheckpointError(
                f"config.json has moe_normalize_expert_weights = {shorten_value(power)}; supported: 1 or null"
            )
        return {"moe.router.normalize": power is not None}

    def write(self, config: ModelConfig) -> Values:
        return {"moe_normalize_expert_weights": 1.0 if config.moe and config.moe.router.normalize else None}


class DbrxRope(Rope):
    """The rotary embedding, whose base `attn_config` may have."""

    def read(self, hf: HFConfig) -> Values:
        inner = hf.get("attn_config")
        theta = inner.get("rope_theta") if isinstance(inner, dict) else None
        found = super().read(hf if theta is None or "rope_theta" in hf else {**hf, "rope_theta": theta})
        if theta is not None and found["rope.rotary_base"] != theta:
            raise CheckpointError(
                f"config.json has rope_theta = {found['rope.rotary_base']} and, in attn_config, {shorten_value(theta)}"
            )
        return found


class LossWeight(OwnEntry):
    """`output_router_logits` with `moe_loss_weight` of `ffn_config`: the load-balancing loss."""

    names = ("output_router_logits",)

    def read(self, hf: HFConfig) -> Values:
        inner = hf.get("ffn_config")
        weight = read_typed(inner if isinstance(inner, dict) else {}, "moe_loss_weight", float, 0.01)
        used = hf.get("output_router_logits") is not None and read_typed(hf, "output_router_logits", bool, False)
        if not used or not weight:
            return {"moe.aux_loss_coeff": 0.0}
        return {"moe.aux_loss_coeff": weight, "moe.moe_router_load_balancing_type": "joint_aux_loss"}

    def write(self, config: ModelConfig) -> Values:
        return {"output_router_logits": joint_coefficient(config) > 0}


_FORM = Names(
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{i}",
    norms=("norm_attn_norm.norm_1", None, "norm_attn_norm.norm_2", None),
    qkv=("norm_attn_norm.attn.Wqkv",),
    proj="norm_attn_norm.attn.out_proj",
    router="ffn.router.layer",
    experts=FlatExperts(),
)
_APART = PerExpert(*(f"ffn.experts.mlp.{{e}}.{name}" for name in ("w1", "v1", "w2")))

DBRX = Family(
    model_type="dbrx",
    fields=(
        Field("vocab_size", "vocab_size", int, 32000),
        OneOf(("d_model", "hidden_size"), "hidden_size", int, 2048),
        OneOf(("n_layers", "num_hidden_layers"), "num_layers", int, 24),
        OneOf(("n_heads", "num_attention_heads"), "attention.num_attention_heads", int, 16),
        OneOf(("max_seq_len", "max_position_embeddings"), "max_position_embeddings", int, 2048),
        Field("initializer_range", "init_method_std", float, 0.02),
        Only("tie_word_embeddings", False),
        Dropouts("resid_pdrop", "emb_pdrop"),
        PaddingIdx(None),
        *layer_norm_entries(bias=False),
        Fixed("norm.layernorm_epsilon", 1e-5),
        Within(
            "attn_config",
            (
                Field("kv_n_heads", "attention.num_query_groups", int, 1),
                Nullable("clip_qkv", "attention.clip_qkv", None),
                Field("attn_pdrop", "attention.attention_dropout", float, 0.0),
                Repeated("rope_theta", lambda config: config.rope.rotary_base),
            ),
        ),
        Within(
            "ffn_config",
            (
                Field("ffn_hidden_size", "moe.moe_ffn_hidden_size", int, 3584),
                Field("ffn_hidden_size", "mlp.ffn_hidden_size", int, 3584),  # no layer has a dense MLP
                Field("moe_num_experts", "moe.num_moe_experts", int, 4),
                Field("moe_top_k", "moe.moe_router_topk", int, 1),
                NoNoise(),
                Repeated("moe_loss_weight", joint_coefficient),
                NormalizedWeights(),
                ExpertActivation(),
            ),
        ),
        LossWeight(),
        DbrxRope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="per-expert", loadable=False, experts=_APART),),
)
