"""A norm followed by a dense layer, as one module: the pair that a fused kernel can serve."""

from __future__ import annotations

import torch
from torch import Tensor

from .gemm_module import GemmModule
from .linear_function import linear
from .module import InitMethod, default_init_method, empty_parameter
from .norm import PrecedingNorm
from .stored_weight import store_weights_as_asked


class LayerNormLinear(PrecedingNorm, GemmModule):
    """`y = norm(x) w^T + b`. Transformer Engine: `te.pytorch.LayerNormLinear`.

    Parameters: layer_norm_weight [in] (unless norm_weight is False), layer_norm_bias [in] (with norm_bias, by default
    for LayerNorm), weight [out, in], bias [out]. cast_order None: each norm's own default. The other options: see
    `GemmModule`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        norm_weight: bool = True,
        norm_bias: bool | None = None,
        zero_centered_gamma: bool = False,
        cast_order: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(1, name, fuse_wgrad_accumulation, delay_wgrad_compute, False)
        self.in_features = in_features
        self.out_features = out_features
        self.init_method = init_method or default_init_method
        new = {"params_dtype": params_dtype, "device": device}
        self.add_norm(in_features, normalization, eps, zero_centered_gamma, cast_order, norm_weight, norm_bias, **new)
        self.weight = empty_parameter(out_features, in_features, **new)
        self.bias = empty_parameter(out_features, **new) if bias else None
        self.reset_parameters()
        store_weights_as_asked(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters anew."""
        self.reset_norm()
        self.init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x: [..., in_features] -> [..., out_features], in the compute dtype. is_first_microbatch: as for `Linear`."""
        cached = self.cached_weight((self.weight,), is_first_microbatch, gemm=0)
        return linear(
            self, self.normed(x), self.weight, self.bias, cached=cached, options=self.gemm_options(self.weight)
        )

    def extra_repr(self) -> str:
        return f"{self.normalization}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"
