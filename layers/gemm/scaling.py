"""What the GEMMs of a layer scale by: the quantizers that a recipe gives them, with the module's live tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..quantizer.delayed import STATISTICS
from ..quantizer.group_offsets import GroupOffsets
from ..quantizer.identity import UNQUANTIZED
from ..quantizer.state import NO_STATE, AnyQuantizer, QuantizerState, unrecorded, with_gradient_state, with_state
from ..recipe.base import GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedFields, QuantizedStorage
from .wgrad import WeightGradient


class GemmOptions(NamedTuple):
    """How a module wants its gradients: see `Linear`."""

    save_original_input: bool = False
    wgrad: WeightGradient | None = None


DEFAULT_OPTIONS = GemmOptions()


class GemmConfig(NamedTuple):
    """The constants of a layer's GEMMs. index: of its GEMM among the module's, the column of the state that is its own;
    None: all of them, as of a grouped layer."""

    quantizers: GemmQuantizers
    options: GemmOptions = DEFAULT_OPTIONS
    index: int | None = 0


class GemmCall(NamedTuple):
    """What a module hands down for one call of its GEMM, or of all GEMMs of a grouped layer.

    config: quantizers and options, None for high precision whose gradients go to autograd; cached: the weight quantized
    in an earlier micro-batch; amaxes: where a calibration records the amaxes of the input and of the weight.
    """

    config: GemmConfig | None
    state: QuantizerState
    cached: QuantizedTensor | None = None
    amaxes: tuple[Tensor, Tensor] | None = None


class Scaling(NamedTuple):
    """The constants of a layer's GEMMs and the live tensors of its module: gives each operand its quantizer."""

    config: GemmConfig
    state: QuantizerState = NO_STATE

    @classmethod
    def of_backward(
        cls,
        config: GemmConfig,
        scale: Tensor | None,
        key: Tensor | None,
        gradient: Tensor | None,
        gradient_log: Tensor | None,
        grad_statistics: Tensor | None,
    ) -> Scaling:
        """Return what a backward pass reads: scale and key as the forward pass saved them; the others it writes to."""
        return cls(config, QuantizerState(scale, None, gradient, None, grad_statistics, key, gradient_log))

    def for_input(self, records: bool = False) -> AnyQuantizer:
        """Return the quantizer of the input. records: whether it records amaxes in the module's."""
        config, state = self
        if state.scale is None:
            return config.quantizers.input
        return with_state(config.quantizers.input, state.scale, state.amax if records else None, "input", config.index)

    def for_weight(self, records: bool = False) -> AnyQuantizer:
        """Return the quantizer of the weight, as `for_input`."""
        config, state = self
        if state.scale is None:
            return config.quantizers.weight
        amax = state.amax if records else None
        return with_state(config.quantizers.weight, state.scale, amax, "weight", config.index)

    def for_gradient(
        self, dy: Tensor, amax: Callable[[Tensor], Tensor], offsets: GroupOffsets | None = None
    ) -> AnyQuantizer:
        """Return the quantizer of the gradient of the output (one that keeps values as they are where the recipe says
        so), and record the statistics of quantizing dy, if they are wanted. amax: of `with_gradient_state`."""
        (quantizers, _, index), state = self
        if quantizers.backward_override:
            return UNQUANTIZED
        quantizer = with_gradient_state(quantizers.grad_output, state, lambda: amax(dy.detach()), index)
        if state.grad_statistics is not None:
            into = state.grad_statistics[(index or 0) % state.grad_statistics.shape[0]]
            record_statistics(into, unrecorded(quantizer), dy, state.key, offsets)
        return quantizer

    def record_statistics(
        self, x: Tensor | QuantizedStorage, weight: Tensor | QuantizedStorage, offsets: GroupOffsets | None = None
    ) -> None:
        """Record the statistics of quantizing the input and the weight, where they are wanted, and not of what comes
        quantized: they describe the values before. offsets: the groups of x, if any."""
        statistics, index = self.state.statistics, self.config.index
        if statistics is None:
            return
        of_gemm = statistics[(index or 0) % statistics.shape[0]]
        if not isinstance(x, QuantizedFields):
            record_statistics(of_gemm[0], self.for_input(), x, offsets=offsets)
        if not isinstance(weight, QuantizedFields):
            record_statistics(of_gemm[1], self.for_weight(), weight)


def record_statistics(
    into: Tensor,
    quantizer: AnyQuantizer,
    x: Tensor,
    key: Tensor | None = None,
    offsets: GroupOffsets | None = None,
) -> None:
    """Write the statistics of quantizing x into `into` [5]. offsets: the groups of x, each of which is quantized by
    itself; without them x is a matrix, or a stack of matrices."""
    x = x.detach()
    found = quantizer.statistics(x, key) if offsets is None else quantizer.rows_statistics(x, offsets, key)
    into.copy_(torch.stack([found[name].float() for name in STATISTICS]))
