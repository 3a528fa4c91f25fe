"""How files store the gated delta rule where q, k and v are projections apart: OLMo's, Kimi's and Ling's names."""

import math
from dataclasses import dataclass
from typing import Literal

from te_models.config import GatedDeltaConfig, ModelConfig

from ...mapping.blocks import joined
from ...mapping.layout_ops import At, Concat, Layout, Unsqueezed
from .recurrent import Weights


@dataclass(frozen=True)
class SeparateDeltaNames:
    """The gated delta rule with projections apart.

    Arguments:
        at: what its names begin with, in the layer.
        convolution: a kernel each for q, k and v (apart), one for all (joined), or three of equal size, whatever the
            widths, into which transformers cuts the one that it holds (thirds).
        forget: what the names of the decay's parameters begin with.
        decay: the projection of a decay without latent.
        decay_dims: dimensions of size 1 that the decay's rate has in files.
        proj: the output projection.
    """

    at: str = "self_attn."
    convolution: Literal["apart", "joined", "thirds"] = "apart"
    forget: str = ""
    decay: str = "f_proj"
    decay_dims: tuple[int, ...] = ()
    proj: str = "o_proj"

    def weights(self, config: ModelConfig, mixer: GatedDeltaConfig, at: str, ours: str) -> Weights:
        at += self.at
        forget, K, V = at + self.forget, mixer.key_size, mixer.value_size
        yield f"{ours}conv_weight", self._convolution(at, K, V)
        yield f"{ours}A_log", Unsqueezed(f"{forget}A_log", self.decay_dims) if self.decay_dims else At(f"{forget}A_log")
        yield f"{ours}dt_bias", At(f"{forget}dt_bias")
        yield f"{ours}norm_weight", At(f"{at}o_norm.weight")
        names = ("q_proj", "k_proj", "v_proj", "g_proj")[: len(mixer.joined)]
        first = f"{ours}linear_in.weight"
        yield first, joined(config, first, *(At(f"{at}{name}.weight") for name in names))
        yield f"{ours}step.weight", At(f"{at}b_proj.weight")
        if mixer.decay_lora_rank is None:
            yield f"{ours}decay.weight", At(f"{forget}{self.decay}.weight")
        else:
            yield f"{ours}decay_down.weight", At(f"{forget}f_a_proj.weight")
            yield f"{ours}decay.weight", At(f"{forget}f_b_proj.weight")
        if mixer.gate_lora_rank is not None:
            yield f"{ours}gate_down.weight", At(f"{at}g_a_proj.weight")
            yield f"{ours}gate.weight", At(f"{at}g_b_proj.weight")
        yield f"{ours}linear_proj.weight", At(f"{at}{self.proj}.weight")

    def _convolution(self, at: str, keys: int, values: int) -> Layout:
        if self.convolution == "joined":
            return Unsqueezed(f"{at}conv1d.weight", 1)
        total = 2 * keys + values
        third = math.ceil(total / 3)
        sizes = (keys, keys, values) if self.convolution == "apart" else (third, third, total - 2 * third)
        return Concat(*((Unsqueezed(f"{at}{n}_conv1d.weight", 1), size) for n, size in zip("qkv", sizes)))
