"""A norm followed by a dense layer, as one module: the pair that a fused kernel can serve."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .linear_function import linear
from .module import InitMethod, default_init_method, empty_parameter, stored_weight
from .norm import apply_norm, default_cast_order


class LayerNormLinear(nn.Module):
    """`y = norm(x) w^T + b`. Transformer Engine: `te.pytorch.LayerNormLinear`.

    Parameters: layer_norm_weight [in] (unless norm_weight is False), layer_norm_bias [in] (with norm_bias, by default
    for LayerNorm), weight [out, in], bias [out]. cast_order None: each norm's own default.
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
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.cast_order = cast_order or default_cast_order(normalization)
        self.init_method = init_method or default_init_method
        new = {"params_dtype": params_dtype, "device": device}
        norm_bias = normalization == "LayerNorm" if norm_bias is None else norm_bias
        self.layer_norm_weight = empty_parameter(in_features, **new) if norm_weight else None
        self.layer_norm_bias = empty_parameter(in_features, **new) if norm_bias else None
        self.weight = empty_parameter(out_features, in_features, **new)
        self.bias = empty_parameter(out_features, **new) if bias else None
        self.reset_parameters()
        self.weight = stored_weight(self.weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters anew."""
        if self.layer_norm_weight is not None:
            self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        self.init_method(self.weight)
        for bias in (self.layer_norm_bias, self.bias):
            if bias is not None:
                bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features], in the compute dtype."""
        normed = apply_norm(
            self.normalization,
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            self.zero_centered_gamma,
            self.cast_order,
        )
        return linear(normed, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.normalization}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"
