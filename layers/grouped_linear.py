"""The layer of experts: one GEMM per group of rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .grouped_function import grouped_linear
from .module import InitMethod, default_init_method, empty_parameter


class GroupedLinear(nn.Module):
    """`y[g] = x[g] w[g]^T + b[g]` for `num_gemms` groups of rows. Transformer Engine: `te.pytorch.GroupedLinear`.

    single_grouped_weight: True holds one parameter `weight` [num_gemms, out, in] (and `bias` [num_gemms, out]);
    False holds `weight0`, `weight1`, ... (and `bias0`, ...), Transformer Engine's per-GEMM layout. Both are layouts of
    the same layer: `load_state_dict` accepts either. The grouped one is the fast one, the other is stacked on each call.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        single_grouped_weight: bool = True,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"num_gemms is {num_gemms}; allowed: a positive integer")
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.init_method = init_method or default_init_method
        new = {"params_dtype": params_dtype, "device": device}
        if single_grouped_weight:
            self.weight = empty_parameter(num_gemms, out_features, in_features, **new)
            self.bias = empty_parameter(num_gemms, out_features, **new) if bias else None
        else:
            for g in range(num_gemms):
                self.register_parameter(f"weight{g}", empty_parameter(out_features, in_features, **new))
                if bias:
                    self.register_parameter(f"bias{g}", empty_parameter(out_features, **new))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every member anew."""
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                parameter.zero_()
            else:
                self.init_method(parameter)

    def _grouped(self, name: str) -> Tensor:
        """Return the parameter in grouped form."""
        if self.single_grouped_weight:
            return getattr(self, name)
        return torch.stack([getattr(self, f"{name}{g}") for g in range(self.num_gemms)])

    def forward(self, x: Tensor, m_splits: Tensor | list[int]) -> Tensor:
        """x: [T, in_features], rows sorted by group; m_splits: [num_gemms] rows per group, a device tensor (never read
        on the host) or a list. Returns [T, out_features]; rows past the last group are zero (plus no bias contract)."""
        if not isinstance(m_splits, Tensor):
            m_splits = torch.tensor(m_splits, dtype=torch.int64, device=x.device)
        if m_splits.shape != (self.num_gemms,):
            raise ValueError(f"m_splits has shape {tuple(m_splits.shape)}; allowed: ({self.num_gemms},), one entry per GEMM")
        bias = self._grouped("bias") if self.use_bias else None
        return grouped_linear(x, self._grouped("weight"), bias, m_splits)

    def extra_repr(self) -> str:
        layout = "grouped" if self.single_grouped_weight else "per-GEMM"
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), bias={self.use_bias}, {layout}"
