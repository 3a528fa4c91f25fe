"""A gated short convolution as a mixer (LFM2, arXiv 2511.23404).

B batch, S sequence, H hidden, D channels of a rank.
"""

from typing import Any

from torch import Tensor

from ...config import ModelConfig, ShortConvolutionConfig
from ..build import Build, make_input_linear, make_output_linear
from .base import MixerInputs, RecurrentMixer
from .convolved import convolved, start_convolution


class ShortConvolution(RecurrentMixer):
    """C times the convolution of B times x; the rows of `linear_in` are B, C and x."""

    def __init__(self, config: ModelConfig, mixer: ShortConvolutionConfig, layer: int, build: Build) -> None:
        super().__init__()
        self.mixer, self.build = mixer, build
        own, D = mixer.channels // build.tp_size, mixer.channels
        self.conv_weight = build.parameter(own, mixer.conv_kernel_size)
        self.conv_bias = build.parameter(own) if mixer.use_bias else None
        self.linear_in = make_input_linear(config, (D, D, D), mixer.use_bias, build, normed=False)
        self.linear_proj = make_output_linear(config, D, mixer.use_bias, build)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the convolution as torch fills one; the projections have their own."""
        start_convolution(self.conv_weight, self.conv_bias, (self.mixer.channels,), self.build)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        """As `Mixer`."""
        (taps,) = (None,) if cache is None else cache.read()
        rows = self.linear_in(x)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        b, c, value = rows.chunk(3, -1)
        y, taps = convolved(b * value, inputs, self.conv_weight, self.conv_bias, None, taps, self.context_shard)
        if cache is not None:
            cache.write(taps)
        y = c * y
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))
