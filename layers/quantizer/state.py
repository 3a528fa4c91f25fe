"""The live tensors that quantizers of one module need, and quantizers with their part of them.

A recipe's quantizers are values. Delayed scaling scales by tensors that a module keeps and records amaxes in others;
stochastic rounding draws from a key. A forward pass hands all of these down as one `QuantizerState`.

The seed of a stream that nobody has seeded follows from where torch's generator stands (`default_seed`). Nothing is
drawn from that generator, so the parameters that it initialises are the same with or without this.
"""

import ctypes
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .base import Quantizer
from .delayed import ROLES, DelayedScalingQuantizer, Float8Quantizer, log_amax_

AnyQuantizer = Quantizer | Float8Quantizer
"""A value, or one with the scale and the amax of its module."""


class QuantizerState(NamedTuple):
    """A module's live tensors (G GEMMs, S GEMMs with separate statistics); None where not needed.

    scale: [3, G] of input, weight and grad_output; amax: [2, G], what the forward roles record; gradient: [3, G], of
    gradients the recorded amax, the scale and its generation; statistics: [S, 2, 5] and grad_statistics: [S, 5], see
    `quantization_statistics`; key: int64 [2], (seed, counter) of this pass; gradient_log: where the backward pass of a
    graph records amaxes, see `delayed`.
    """

    scale: Tensor | None = None
    amax: Tensor | None = None
    gradient: Tensor | None = None
    statistics: Tensor | None = None
    grad_statistics: Tensor | None = None
    key: Tensor | None = None
    gradient_log: Tensor | None = None


NO_STATE = QuantizerState()


def with_state(
    quantizer: Quantizer, scale: Tensor | None, amax: Tensor | None, role: str, gemm_index: int | None = None
) -> AnyQuantizer:
    """Return the quantizer to use: itself, or under delayed scaling the live one of a role.

    Of a forward role; see `with_gradient_state`. scale: [3, G]; amax: [2, G], or None to record nothing; gemm_index: of
    the GEMM meant, None for all together.
    """
    if not isinstance(quantizer, DelayedScalingQuantizer):
        return quantizer
    assert scale is not None, "a delayed quantizer comes with its module's scales"
    row = ROLES.index(role)
    return quantizer.with_state(_slot(scale, row, gemm_index), None if amax is None else _slot(amax, row, gemm_index))


def with_gradient_state(
    quantizer: Quantizer, state: QuantizerState, amax: Callable[[], Tensor], gemm_index: int | None = None
) -> AnyQuantizer:
    """Return the quantizer of gradients to use, as `with_state`, with the scale as it is when the backward pass runs;
    it records into `state.gradient`. amax: returns the amaxes of the gradient that it will quantize, of each GEMM, for
    a graph, where this records them in `state.gradient_log`."""
    if not isinstance(quantizer, DelayedScalingQuantizer):
        return quantizer
    gradient, log = state.gradient, state.gradient_log
    assert gradient is not None, "a delayed quantizer comes with its module's scales"
    if log is None:
        return quantizer.with_state(_slot(gradient, 1, gemm_index), _slot(gradient, 0, gemm_index))
    own = amax()
    own = torch.fmax(own, torch.zeros_like(own))  # NaN is ignored
    # the scale and the generation, neither of them negative; by their dependence on the gradient, no compiler reads
    # them in the forward pass, before the exit of the region has written them
    scale, generation = [torch.maximum(_slot(gradient, row, gemm_index), -own) for row in (1, 2)]
    log_amax_(log, generation, own, gemm_index)
    return quantizer.with_state(scale, None)


def unrecorded(quantizer: AnyQuantizer) -> AnyQuantizer:
    """Return a quantizer that records no amaxes."""
    if not isinstance(quantizer, Float8Quantizer):
        return quantizer
    return Float8Quantizer(quantizer.scale, None, quantizer.fp8_dtype)


def _slot(tensor: Tensor, row: int, gemm_index: int | None) -> Tensor:
    """Return a row of a matrix, [G], or an element of it, []: in one step, as a graph undoes each."""
    return tensor[row] if gemm_index is None else tensor.view(-1)[row * tensor.shape[1] + gemm_index]


def value_of(quantizer: AnyQuantizer) -> Quantizer:
    """Return the quantizer whose fields this one fills."""
    return quantizer.value if isinstance(quantizer, Float8Quantizer) else quantizer


SEEDS = 2**42
STREAMS = 2**20  # how many layers one seed serves


def default_seed() -> int:
    """Return a number in [-SEEDS, 0) that follows from the state of torch's CPU generator alone.

    Equal states give equal numbers: again after `torch.manual_seed` with the same seed. It is negative; seeds that a
    caller gives never are.
    """
    global _last_seed
    state = torch.get_rng_state()
    content = ctypes.string_at(state.data_ptr(), state.numel())
    known, seed = _last_seed
    if content != known:
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % SEEDS - SEEDS
        _last_seed = content, seed
    return seed


_last_seed = b"", 0
"""The state that was there when it was asked last, and the number that follows from it: modules that draw nothing ask
again and again. One pair, which threads read and write at once."""
