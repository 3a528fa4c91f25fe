"""The base of modules with GEMMs whose weight gradients can be fused into a main gradient or computed later."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..functional.dense_gemms import DEFAULT_OPTIONS, GemmConfig, GemmOptions
from ..functional.linear import GemmCall
from ..functional.wgrad import weight_gradient
from ..quantizer.state import NO_STATE
from ..recipe.base import HIGH_PRECISION
from ..recipe.context import state
from ..tensor.fsdp import sharded
from .base import QuantizedModule


class GemmModule(QuantizedModule):
    """fuse_wgrad_accumulation: weight gradients are added to `weight.main_grad` in place and `weight.grad` stays None;
    a call with `is_first_microbatch=True` writes them there instead, so that nobody has to zero it.
    delay_wgrad_compute: backward leaves weight gradients out until `backward_dw()`. save_original_input: keep the
    input as it is for wgrad and quantize it in the backward pass, which saves memory where several layers share it.
    Names and meanings are Transformer Engine's."""

    def __init__(
        self,
        num_gemms: int,
        name: str,
        fuse_wgrad_accumulation: bool,
        delay_wgrad_compute: bool,
        save_original_input: bool,
    ) -> None:
        super().__init__(num_gemms, name)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self._later: list[Callable[[], None]] | None = [] if delay_wgrad_compute else None

    return_bias = return_layernorm_output = False  # layers that have these options set them

    def results(
        self, y: Tensor, bias: Tensor | None, normed: Tensor | None = None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return y, or with it what the layer was told to return: its bias, in y's dtype, and the normed input."""
        found: tuple[Tensor | None, ...] = (y,)
        if self.return_bias:
            found += (None if bias is None else bias.to(y.dtype),)
        if self.return_layernorm_output:
            found += (normed,)
        return found if len(found) > 1 else y

    def gemm_call(
        self, weights: tuple[nn.Parameter, ...], is_first_microbatch: bool | None, gemm_index: int | None = None
    ) -> GemmCall | None:
        """Return what the functions of a GEMM need of this module for one call: what the recipe in force means for it,
        its live state and what it caches; None for plain high precision. gemm_index: of the GEMM with these weights,
        None where one call is of all GEMMs."""
        now = state()
        first = now.first_microbatch if is_first_microbatch is None else is_first_microbatch
        cached = None if first is None else self.cached_weight(weights, first, gemm_index)
        quantizers = self.quantizers()
        options = DEFAULT_OPTIONS
        if self.fuse_wgrad_accumulation or self._later is not None or self.save_original_input:
            options = self.gemm_options(*weights, first=is_first_microbatch)
        amaxes = None
        if now.calibrating and self.calibrating():
            amaxes = self.calibration_amax("input", gemm_index), self.calibration_amax("weight", gemm_index)
        if quantizers is None and options.wgrad is None:
            return None if amaxes is None else GemmCall(None, NO_STATE, None, amaxes)
        quantizers = quantizers or HIGH_PRECISION
        return GemmCall(GemmConfig(quantizers, options, gemm_index), self.live_state(quantizers), cached, amaxes)

    def gemm_options(self, *weights: nn.Parameter, first: bool | None = None) -> GemmOptions:
        """Return how the gradients of `weights` are to be made, of several together. first: `is_first_microbatch` of
        this call; where it is True a main gradient is written to and not added to, as in Transformer Engine."""
        if not self.fuse_wgrad_accumulation and self._later is None:
            return GemmOptions(True) if self.save_original_input else DEFAULT_OPTIONS
        return GemmOptions(
            self.save_original_input, weight_gradient(weights, self.fuse_wgrad_accumulation, self._later, first is True)
        )

    def backward_dw(self) -> None:
        """Compute the weight gradients that backward left out, oldest first. Raises RuntimeError without
        delay_wgrad_compute, where the input or the gradient of the output, of which one that is not quantized is kept
        as it is, was written to since the backward pass, and of weights that FSDP2 shards."""
        if self._later is None:
            raise RuntimeError("backward_dw needs a layer built with delay_wgrad_compute=True")
        if self._later and sharded(self.parameters(recurse=False)):
            raise RuntimeError(
                "FSDP2 has sharded the weights again and reduces no gradient that comes after the backward pass; "
                "allowed: layers built without delay_wgrad_compute"
            )
        while self._later:
            self._later.pop(0)()
