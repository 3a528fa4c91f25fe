"""Latent attention in files: DeepSeek's names, common to all families with it, and its configuration fields."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from te_models.config import AttentionConfig, ModelConfig

from ...io.errors import CheckpointError, shown_untrusted
from ...mapping.blocks import joined
from ...mapping.layout_ops import At, Layout
from .fields import Entry, Field, HFConfig, OwnEntry, Values, read_typed
from .indexer import indexer_weights
from .rope import Rope


def latent_attention(
    config: ModelConfig, a: AttentionConfig, at: str, ours: str, gate: str, proj: str
) -> Iterator[tuple[str, Layout]]:
    """Yield the weight map of one layer's attention, without the norm before it. gate, proj: the names, in the layer,
    of the projections of the output gate and of the output, beside which the other ones are."""
    yield from indexer_weights(a, at, ours)
    mla, gate = a.mla, at + gate
    assert mla is not None, "called for latent attention only"
    module, _, proj = (at + proj).rpartition(".")
    at = f"{module}."
    q = "q_proj" if mla.q_lora_rank is None else "q_a_proj"
    if a.add_qkv_bias and mla.q_lora_rank is None:
        yield f"{ours}latent_bias", At(f"{at}kv_a_proj_with_mqa.bias")
    for kind in ("weight", "bias") if a.add_qkv_bias and mla.q_lora_rank is not None else ("weight",):
        down = f"{ours}linear_qkv_down.{kind}"
        yield down, joined(config, down, At(f"{at}{q}.{kind}"), At(f"{at}kv_a_proj_with_mqa.{kind}"))
    for name, theirs in (("linear_q_up", "q"), ("linear_kv_up", "kv")):
        if name == "linear_kv_up" or mla.q_lora_rank is not None:
            yield f"{ours}{name}.layer_norm_weight", At(f"{at}{theirs}_a_layernorm.weight")
            yield f"{ours}{name}.weight", At(f"{at}{theirs}_b_proj.weight")
    if a.has_head_gate:
        yield f"{ours}head_gate.weight", At(f"{gate}.weight")
    for kind in ("weight", "bias") if a.add_output_bias else ("weight",):
        yield f"{ours}linear_proj.{kind}", At(f"{at}{proj}.{kind}")


@dataclass(frozen=True)
class QueryRank:
    """`q_lora_rank`: null means that q has no latent; absent means `default`."""

    default: int | None
    names: tuple[str, ...] = ("q_lora_rank",)

    def read(self, hf: HFConfig) -> Values:
        if hf.get("q_lora_rank", self.default) is None:
            return {"attention.mla.q_lora_rank": None}
        return {"attention.mla.q_lora_rank": read_typed(hf, "q_lora_rank", int, self.default)}

    def write(self, config: ModelConfig) -> Values:
        mla = config.attention.mla
        return {"q_lora_rank": None if mla is None else mla.q_lora_rank}


@dataclass(frozen=True)
class YarnScores:
    """The rotary embedding. Under yarn `mscale_all_dim` also scales the softmax, by the square of what it gives.

    transformers does so under every extension that has the key; no published file has it with another one.
    """

    nope: int
    rope_dim: int
    rope: Entry
    names: tuple[str, ...] = Rope.names

    def read(self, hf: HFConfig) -> Values:
        result = self.rope.read(hf)
        values = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if result["rope.scaling"] not in ("none", "yarn") and values.get("mscale_all_dim"):
            raise CheckpointError(
                f"config.json has mscale_all_dim = {shown_untrusted(values['mscale_all_dim'])} beside the rope type "
                f"{shown_untrusted(values.get('rope_type', values.get('type')))}; supported: beside 'yarn', or 0"
            )
        mscale, factor = result.get("rope.mscale_all_dim"), result.get("rope.factor")
        if result["rope.scaling"] == "yarn" and mscale and factor:
            sizes = zip(("qk_nope_head_dim", "qk_rope_head_dim"), (self.nope, self.rope_dim))
            channels = sum(read_typed(hf, name, int, default) for name, default in sizes)
            if not 0 < channels < 1 << 31 or factor <= 0:
                raise CheckpointError(f"config.json has {channels} channels per head and a rope factor of {factor}")
            stretch = 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
            result["attention.softmax_scale"] = channels**-0.5 * stretch * stretch
        return result

    def write(self, config: ModelConfig) -> Values:
        return self.rope.write(config)


class KeysForEveryHead(OwnEntry):
    """`num_key_value_heads`, from which transformers computes how often it repeats keys: it must be the number of
    heads, whatever the class's default is."""

    names = ("num_key_value_heads",)

    def read(self, hf: HFConfig) -> Values:
        return {}

    def write(self, config: ModelConfig) -> Values:
        return {"num_key_value_heads": config.attention.num_attention_heads}


def latent_fields(
    *, query_rank: int | None, rank: int = 512, nope: int = 128, rotated: int = 64, value: int = 128, rope: Entry | None
) -> tuple[Entry, ...]:
    """Return the fields of latent attention; the arguments are the class's defaults. rope: None where nothing rotates,
    the channels that would included."""
    return (
        QueryRank(query_rank),
        KeysForEveryHead(),
        Field("kv_lora_rank", "attention.mla.kv_lora_rank", int, rank),
        Field("qk_nope_head_dim", "attention.mla.qk_head_dim", int, nope),
        Field("qk_rope_head_dim", "attention.mla.qk_pos_emb_head_dim", int, rotated),
        Field("v_head_dim", "attention.mla.v_head_dim", int, value),
        *(() if rope is None else (YarnScores(nope, rotated, rope),)),
    )
