"""falcon_h1: attention and Mamba-2 side by side in every layer, and fourteen multipliers (arXiv 2507.22448)."""

import math
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .bamba import BAMBA
from .base.common import ATTENTION_BIAS, HeadDim, decoder_fields
from .base.family import Family
from .base.fields import Field, HFConfig, Only, OwnEntry, Values, read_typed, shorten_value
from .base.recurrent import MixerField, Nested, RecurrentLayers, TimeStepLimit
from .base.rope import Rope


class KeyMultiplier(OwnEntry):
    """`key_multiplier`, a factor of the keys, and so of the scores."""

    names = ("key_multiplier",)

    def read(self, hf: HFConfig) -> Values:
        channels = HeadDim(None).read(hf)["attention.kv_channels"]
        factor = read_typed(hf, "key_multiplier", float, 1.0)
        if not factor > 0:
            raise CheckpointError(f"config.json has key_multiplier = {factor}; allowed: a positive number")
        return {} if factor == 1 else {"attention.softmax_scale": factor * channels**-0.5}

    def write(self, config: ModelConfig) -> Values:
        a = config.attention
        usual = a.key_channels**-0.5
        factor = 1.0 if a.softmax_scale is None else a.softmax_scale / usual
        near = (float(f"{factor:.12g}"), factor, math.nextafter(factor, 0), math.nextafter(factor, math.inf))
        return {"key_multiplier": next((x for x in near if x * usual == a.softmax_scale), factor)}


class MLPMultipliers(OwnEntry):
    """`mlp_multipliers`: of the gate, and of the result."""

    names = ("mlp_multipliers",)

    def read(self, hf: HFConfig) -> Values:
        return dict(zip(_MLP, _numbers(hf, "mlp_multipliers", 2), strict=True))

    def write(self, config: ModelConfig) -> Values:
        return {"mlp_multipliers": [config.mlp.gate_multiplier, config.mlp.output_multiplier]}


_MLP = ("mlp.gate_multiplier", "mlp.output_multiplier")


def _numbers(hf: HFConfig, name: str, count: int) -> list[float]:
    """Return a list of this many numbers; ones where the file has none."""
    values = read_typed(hf, name, list, None)
    values = [1.0] * count if values is None else values
    if len(values) != count:
        raise CheckpointError(f"config.json has {name} = {shorten_value(values)}; allowed: {count} numbers, or null")
    return [read_typed({name: value}, name, float, 1.0) for value in values]


@dataclass(frozen=True)
class RowMultipliers(MixerField):
    """`ssm_multipliers`: of z, x, B, C and the time step."""

    hf: str = "ssm_multipliers"
    name: str = "row_multipliers"
    kind: type = list

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        values = _numbers(hf, self.hf, 5)
        return {} if set(values) == {1.0} else {self.name: values}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {self.hf: list(mixer.row_multipliers or [1.0] * 5)}


@dataclass(frozen=True)
class Size(MixerField):
    """`mamba_d_ssm`, null for `mamba_expand` times hidden_size: the channels of all heads; `mamba_d_head` has to agree
    unless it is "auto"."""

    hf: str = "mamba_d_ssm"
    name: str = "head_dim"
    kind: type = int

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        heads = read_typed(hf, "mamba_n_heads", int, 128)
        size = read_typed(hf, "mamba_d_ssm", int, None) if "mamba_d_ssm" in hf else 1024
        size = read_typed(hf, "mamba_expand", int, 2) * nested["hidden_size"] if size is None else size
        value = hf.get("mamba_d_head", "auto")
        if heads < 1 or size % heads or value not in ("auto", size // heads):
            raise CheckpointError(
                f"config.json has mamba_d_head = {shorten_value(value)} and {heads} heads; allowed: 'auto', or the "
                f"{size} channels of mamba_d_ssm by the heads"
            )
        return {"head_dim": size // heads}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {"mamba_d_ssm": mixer.size, "mamba_d_head": mixer.head_dim}


@dataclass(frozen=True)
class Gate(MixerField):
    """`mamba_rms_norm`: whether the output has a norm; `mamba_norm_before_gate`: whether it comes before the gate."""

    hf: str = "mamba_rms_norm"
    name: str = "gate"
    kind: type = bool

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        normed = read_typed(hf, "mamba_rms_norm", bool, False)
        first = read_typed(hf, "mamba_norm_before_gate", bool, True)
        return {"gate": "no_norm" if not normed else "after_norm" if first else "before_norm"}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {"mamba_rms_norm": mixer.gate != "no_norm", "mamba_norm_before_gate": mixer.gate != "before_norm"}


FALCON_H1 = Family(
    model_type="falcon_h1",
    fields=(
        *decoder_fields(max_positions=8192, norm_eps=1e-5, kv_heads=8, pad=0, without=("hidden_act",)),
        ATTENTION_BIAS,
        Only("hidden_act", "silu"),
        Field("mlp_bias", "mlp.bias", bool, False),
        Field("embedding_multiplier", "embedding.multiplier", float, 1.0),
        Field("lm_head_multiplier", "embedding.logits_multiplier", float, 1.0),
        Field("attention_in_multiplier", "attention.input_multiplier", float, 1.0),
        Field("attention_out_multiplier", "attention.output_multiplier", float, 1.0),
        KeyMultiplier(),
        MLPMultipliers(),
        Rope(),
    ),
    mixers=RecurrentLayers(
        kind="mamba2",
        parts=(
            MixerField("mamba_n_heads", "num_heads", int, 128),
            Size(),
            MixerField("mamba_d_state", "state_size", int, 256),
            MixerField("mamba_n_groups", "num_groups", int, 1),
            MixerField("mamba_d_conv", "conv_kernel_size", int, 4),
            MixerField("mamba_proj_bias", "use_bias", bool, False),
            MixerField("projectors_bias", "use_output_bias", bool, False),
            MixerField("mamba_conv_bias", "use_conv_bias", bool, True),
            Gate(),
            TimeStepLimit(),
            MixerField("ssm_in_multiplier", "input_multiplier", float, 1.0),
            MixerField("ssm_out_multiplier", "output_multiplier", float, 1.0),
            RowMultipliers(),
        ),
        extra=("layers_block_type", "mamba_expand", "mamba_d_head", "mamba_norm_before_gate"),
        beside=True,
    ),
    names=BAMBA.names,
)
