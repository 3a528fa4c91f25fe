"""lfm3: lfm2's convolutions over more tokens, windows in some layers of attention, a gate of each head, and norms
behind mixers and MLPs, too (LFM3)."""

from dataclasses import replace

from te_models.config import ModelConfig

from .base.attentions import Nested
from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed, Flag, HFConfig, OneOf, Values, read_typed, switch
from .base.recurrent import MixerField, RecurrentLayers
from .base.rope import RopePerLayerType
from .lfm2 import FORM


class WindowedLayers(RecurrentLayers):
    """`layer_types`, "sliding_attention" among them, and the window, `sliding_window`."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, "sliding_window")

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        kinds = ["sliding" if kind == "sliding_attention" else "full" for kind in self._words(hf, nested["num_layers"])]
        window = None if hf.get("sliding_window", 256) is None else read_typed(hf, "sliding_window", int, 256)
        attention = nested["attention"] | {"window_size": window}
        return {"layer_types": kinds, "attention": attention} | super().read(hf, nested)

    def write(self, config: ModelConfig) -> Values:
        values, window = super().write(config), config.attention.window_size
        windowed = [config.layer_type(i) == "sliding" for i in range(config.num_layers)]
        kinds = ["sliding_attention" if w else kind for w, kind in zip(windowed, values["layer_types"], strict=True)]
        return values | {"layer_types": kinds, "sliding_window": window}


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    """Of four layers one has a window, but for the first, and one sees everything."""
    words = ("sliding_attention", "conv", "full_attention", "conv")
    return [words[i % 4] if i else "conv" for i in range(layers)]


def _gates(by: str, *, on: bool) -> tuple[tuple[str, object], ...]:
    return ("attention.output_gate", on), ("attention.output_gate_by", by)


_FORM = replace(
    FORM,
    norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
    qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
    proj="self_attn.o_proj",
)

LFM3 = Family(
    model_type="lfm3",
    fields=(
        *decoder_fields(
            max_positions=128_000,
            kv_heads=4,
            head_dim=128,
            tied=True,
            pad=124_893,
            without=("hidden_act", "rms_norm_eps"),
        ),
        OneOf(("norm_eps", "rms_norm_eps"), "norm.layernorm_epsilon", float, 1e-5),
        ATTENTION_BIAS,
        Fixed("attention.qk_layernorm", "head"),
        Flag("use_attention_gate", _gates("head", on=True), _gates("channel", on=False), True),
        switch("use_sandwich_norm", "block", "sandwich", "pre", True),
        RopePerLayerType(theta=1e6, sliding_theta=1e4, older=False, proportional=0.5),
    ),
    mixers=WindowedLayers(
        kind="short_convolution",
        parts=(
            MixerField("conv_L_cache", "conv_kernel_size", int, 7),
            MixerField("conv_bias", "use_bias", bool, False),
        ),
        word=("conv",),
        attention=("full_attention", "sliding_attention"),
        pattern=_pattern,
        hidden_as="channels",
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="in-memory", gate="self_attn.g_proj"),),
)
