"""LoRA of GroupedLinear, the layer of experts: an adapter for each expert, each factor one grouped GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.kernels.permute import Permutation, permute
from te_models.layers import QuantizedTensor
from te_models.layers.functional.compute_dtype import compute_dtype

from .adapter import LoraAdapter, plus


class GroupedFactor(nn.Module):
    """weight: [num_gemms, out, in], one factor for each member."""

    def __init__(self, num_gemms: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_gemms, outputs, inputs))

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        """x: [T, in], rows sorted by member; m_splits: [num_gemms] -> [T, out]; rows past the last member are zero."""
        dtype = compute_dtype(x)
        return grouped_gemm(x.to(dtype), self.weight.to(dtype), m_splits)


class LoraGroupedLinear(LoraAdapter):
    """`y[g] = x[g] w[g]^T + b[g] + scaling * (x[g] A[g]^T) B[g]^T`, on a `GroupedLinear`; A: [num_gemms, r, in], B:
    [num_gemms, out, r]. The rank is that of each expert."""

    def factor(self, inputs: int, outputs: int) -> nn.Module:
        return GroupedFactor(self.base_layer.num_gemms, inputs, outputs)

    def row_align(self, device: torch.device) -> int:
        """1: adapters read the rows in high precision, so these are made before any of them is quantized."""
        return 1

    def with_bias(self, y: Tensor, m_splits: Tensor) -> Tensor:
        """As the layer."""
        return self.base_layer.with_bias(y, m_splits)

    def forward(
        self,
        x: Tensor,
        m_splits: Tensor | list[int],
        is_first_microbatch: bool | None = None,
        *,
        permutation: Permutation | None = None,
        row_align: int = 1,
        **options: Any,
    ) -> Tensor:
        """As the layer's: x: [T, in_features], or with `permutation` the tokens that the rows come from ->
        [T, out_features]. Raises ValueError for rows that are quantized already."""
        adapters = self.applied(options)
        if not adapters:
            return self.base_layer(x, m_splits, is_first_microbatch, permutation=permutation, row_align=row_align)
        if isinstance(x, QuantizedTensor):
            raise ValueError("an adapter of GroupedLinear got rows that are quantized; allowed: rows in high precision")
        if not isinstance(m_splits, Tensor):
            m_splits = torch.tensor(m_splits, device=x.device)
        rows = x if permutation is None else permute(x, permutation)
        y = self.base_layer(rows, m_splits, is_first_microbatch, row_align=row_align)
        return plus(y, self.delta(rows, adapters, ("lora_A", "lora_B"), m_splits))
