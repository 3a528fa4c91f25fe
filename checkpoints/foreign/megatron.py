"""Megatron-Core's names and layouts: of models (`mp_rank_XX`), and of distributed checkpoints (`torch_dist`).

Our parameters have these names, too: they follow Megatron-Core. Other are: q, k and v, stored group by group; the two
projections down of latent attention; experts, a level deeper; and in distributed checkpoints layers that are alike,
stored as one tensor with a dimension for them in front. Moments are named by state:
`optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight`.
"""

import re
from collections.abc import Iterator, Mapping

from te_models.config import AttentionConfig, ModelConfig

from ..families.base.family import HasShape
from ..io.errors import CheckpointError
from ..mapping.blocks import joined
from ..mapping.layout_ops import At, Concat, Layout, Rows, Stack
from ..mapping.param_shapes import expected_tensors, head_sizes
from .layouts import Member
from .system import System, is_optimizer

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LATENT = {"linear_q_up": "linear_q_up_proj", "linear_kv_up": "linear_kv_up_proj"}


_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""A norm before a projection, joined with it or as a separate module."""


def named_norm(at: str, rest: str, found: Mapping[str, HasShape] | None) -> str:
    """Return the name of a layer's parameter; of a norm, the one of its two names that a checkpoint has."""
    for one, other in (*_NORMS, *((b, a) for a, b in _NORMS)):
        if found is not None and rest.startswith(one) and at + rest not in found:
            second = f"{at}{other}{rest.removeprefix(one)}"
            return second if second in found else at + rest
    return at + rest


def grouped_rows(a: AttentionConfig, *names: str) -> Layout:
    """Return q, k and v as a tensor that holds, group by group, the query heads of a group, its k and its v. names: one
    for each tensor parallel rank and its share of the groups."""
    heads, groups, size = head_sizes(a)
    if a.gate_rows or a.key_is_value or a.value_channels != size:
        raise CheckpointError("Megatron's attention has q, k and v of one size in each group, and no gate in them")
    each, own = heads // groups, groups // len(names)
    total = own * (each + 2) * size
    at = [(names[group // own], group % own * (each + 2) * size) for group in range(groups)]
    q = [(Rows(name, first, total), each * size) for name, first in at]
    k, v = ([(Rows(name, first + (each + part) * size, total), size) for name, first in at] for part in (0, 1))
    return Concat(*q, *k, *v)


def placed(config: ModelConfig, layer: int, rest: str, at: str) -> Layout:
    """Return where a parameter of a layer is stored in files in which layers are apart. rest: its name in the layer;
    at: what names of the layer begin with."""
    attention = config.attention_of(layer)
    part, _, kind = rest.rpartition(".")
    if part == "self_attention.linear_qkv" and kind in ("weight", "bias"):
        assert attention is not None, "the layer has it"
        return grouped_rows(attention, at + rest)
    if part == "self_attention.linear_qkv_down" and kind in ("weight", "bias"):
        assert attention is not None and attention.mla is not None, "the layer has it"
        q = "linear_q_proj" if attention.mla.q_lora_rank is None else "linear_q_down_proj"
        names = (f"{at}self_attention.{part}.{kind}" for part in (q, "linear_kv_down_proj"))
        return joined(config, f"decoder.layers.{layer}.{rest}", *map(At, names))
    if part == "self_attention.linear_qkv_down":  # its norm; Megatron applies it before both
        return At(f"{at}input_layernorm.{kind.removeprefix('layer_norm_')}")
    for ours, theirs in _LATENT.items():
        if part == f"self_attention.{ours}":
            return At(f"{at}self_attention.{theirs}.{kind}")
    return At(at + rest)


def check_covered(config: ModelConfig) -> None:
    """Raise CheckpointError for a model that has parameters of which Megatron-Core's names are not known here."""
    if config.mtp_num_layers or config.mixers or config.hyper_connections is not None:
        raise CheckpointError(
            "Megatron's checkpoints are read and written of models with one attention; this one has other mixers, "
            "several lanes, or layers that predict further tokens"
        )


def _weights(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    """Of a distributed checkpoint, whose layers are apart or joined, and whose experts are."""
    check_covered(config)
    layers = config.num_layers
    apart = found is not None and any(name.startswith("decoder.layers.0.") for name in found)
    apart = apart or (
        found is None and config.moe is not None and len(set(map(config.is_moe_layer, range(layers)))) > 1
    )
    for name in expected_tensors(config):
        match = _LAYER.fullmatch(name)
        if match is None:
            yield name, At(name)
            continue
        layer, rest = int(match[1]), match[2]
        at = f"decoder.layers.{layer}." if apart else "decoder.layers."
        if rest.startswith("mlp.experts."):
            layout = _experts(layer, rest, at, config, found)
        else:
            layout = placed(config, layer, rest, at)
            layout = At(named_norm(at, rest, found)) if layout == At(at + rest) else layout
        yield name, layout if apart else Member(layout, layer, layers)


def _experts(layer: int, rest: str, at: str, config: ModelConfig, found: Mapping[str, HasShape] | None) -> Layout:
    """Of all experts in one tensor, or of each in its own (`singleton_local_shards`), gate and up apart."""
    assert config.moe is not None, "the layer has experts"
    part, _, kind = rest.removeprefix("mlp.experts.").rpartition(".")
    first = f"{at}mlp.experts.experts.0.{part}.{kind}"
    if found is None or not {first, f"{first}_w"} & set(found):
        return At(f"{at}mlp.experts.experts.{part}.{kind}")
    names = [f"{at}mlp.experts.experts.{e}.{part}.{kind}" for e in range(config.moe.num_moe_experts)]
    if f"{first}_w" not in found:
        return Stack(*map(At, names))
    whole = f"decoder.layers.{layer}.{rest}"
    return Stack(*(joined(config, whole, At(f"{name}_w"), At(f"{name}_v")) for name in names))


def _is_other(name: str) -> bool:
    plain = ("rng_state", "opt_param_scheduler", "rerun_state_machine", "num_floating_point", "args", "iteration")
    return (
        is_optimizer(name)
        or name.startswith(plain)
        or "_extra_state" in name
        or name.endswith(".local_tokens_per_expert")
    )


MEGATRON = System(
    "Megatron-Core",
    _weights,
    lambda name, state: f"optimizer.state.{state}.{name}",
    ("fp32_param", "param"),
    is_other=_is_other,
)
