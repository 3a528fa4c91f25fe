"""The dense layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .gemm_module import GemmModule
from .linear_function import linear
from .module import InitMethod, default_init_method, empty_parameter
from .stored_weight import store_weights_as_asked


class Linear(GemmModule):
    """`y = x w^T + b`, quantized under `autocast`. Transformer Engine: `te.pytorch.Linear`.

    weight: [out_features, in_features]; bias: [out_features]. params_dtype: dtype of the parameters (None: torch's
    default); init_method: fills the weight in place (None: N(0, 0.023^2)); the bias starts at zero. The other options:
    see `GemmModule`; name: see `QuantizedModule`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fuse_wgrad_accumulation: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(1, name, fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input)
        self.in_features = in_features
        self.out_features = out_features
        self.init_method = init_method or default_init_method
        self.weight = empty_parameter(out_features, in_features, params_dtype=params_dtype, device=device)
        self.bias = empty_parameter(out_features, params_dtype=params_dtype, device=device) if bias else None
        self.reset_parameters()
        store_weights_as_asked(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters anew."""
        self.init_method(self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x: [..., in_features] -> [..., out_features], in the compute dtype. is_first_microbatch: True quantizes the
        weight and keeps the result, False uses what was kept, None quantizes without keeping."""
        cached = self.cached_weight((self.weight,), is_first_microbatch, gemm=0)
        return linear(self, x, self.weight, self.bias, cached=cached, options=self.gemm_options(self.weight))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
