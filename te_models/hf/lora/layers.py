"""LoRA of each layer: Linear; LayerNormLinear, after its norm; LayerNormMLP, fc1 after the norm and fc2 after the
activation; GroupedLinear, an adapter for each expert, each factor one grouped GEMM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.kernels.permute import Permutation, permute
from te_models.layers import QuantizedTensor
from te_models.layers.functional.gemm_operand import compute_dtype

from .adapter import FIRST, LoraAdapter, LoraLayer, plus


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
    [num_gemms, out, r]. Each expert has its own rank-r product."""

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
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        *,
        permutation: Permutation | None = None,
        row_align: int = 1,
        **options: Any,
    ) -> Any:
        """As the layer's: x: [T, in_features], or with `permutation` the tokens that the rows come from ->
        [T, out_features]. Raises ValueError for rows that are quantized already, or no matrix, and for buffers."""
        adapters = self.applied(options)
        if not adapters:
            more: dict[str, Any] = {"permutation": permutation, "row_align": row_align}
            return self.base_layer(x, m_splits, is_first_microbatch, out, dgrad_out, **more)
        if isinstance(x, QuantizedTensor) or x.dim() != 2:
            kind = "quantized" if isinstance(x, QuantizedTensor) else f"of shape {tuple(x.shape)}"
            raise ValueError(f"an adapter of GroupedLinear got rows that are {kind}; allowed: plain rows [T, in]")
        if out is not None or dgrad_out is not None:
            raise ValueError("an adapter of GroupedLinear writes to no buffers; allowed: out=None and dgrad_out=None")
        if not isinstance(m_splits, Tensor):
            m_splits = torch.tensor(m_splits, device=x.device)
        rows = x if permutation is None else permute(x, permutation)
        y = self.base_layer(rows, m_splits, is_first_microbatch, row_align=row_align)
        return plus(y, self.delta(rows, adapters, ("lora_A", "lora_B"), m_splits))


class LoraLinear(LoraAdapter):
    """`y = x w^T + b + scaling * (x A^T) B^T`, on a `Linear`."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's: x: [..., in_features] -> [..., out_features]."""
        adapters = self.applied(options)
        y = self.base_layer(x, *args, **options)
        return plus(y, self.delta(x, adapters)) if adapters else y


class LoraLayerNormLinear(LoraAdapter):
    """The same on a `LayerNormLinear`, with norm(x) in place of x: what the weight is multiplied with."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's: x: [..., in_features] -> [..., out_features]."""
        adapters = self.applied(options)
        if not adapters:
            return self.base_layer(x, *args, **options)
        y, normed = self.base_layer.forward_with_norm(x, *args, **options)
        assert normed is not None, "it was asked for"
        return plus(y, self.delta(normed, adapters))


SECOND = ("lora_fc2_A", "lora_fc2_B")


class LoraLayerNormMLP(LoraAdapter):
    """On a `LayerNormMLP`: `lora_A` and `lora_B` belong to fc1, `lora_fc2_A` and `lora_fc2_B` to fc2; the rank is that
    of both."""

    PAIRS: ClassVar[tuple[tuple[str, str], ...]] = (FIRST, SECOND)
    adapter_layer_names = (*LoraLayer.adapter_layer_names, *SECOND)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        fc1, fc2 = self.base_layer.fc1_weight, self.base_layer.fc2_weight
        return (fc1.shape[1], fc1.shape[0]), (fc2.shape[1], fc2.shape[0])

    def weights(self) -> tuple[tuple[str, ...], ...]:
        return ("fc1_weight",), ("fc2_weight",)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        """As the layer's: x: [..., hidden_size] -> [..., hidden_size]."""
        adapters, layer = self.applied(options), self.base_layer
        if not adapters:
            return layer(x, is_first_microbatch)
        hidden, normed = layer.forward_fc1(x, is_first_microbatch)
        hidden = plus(hidden, self.delta(normed, adapters))
        y, activated = layer.forward_fc2(hidden, normed, is_first_microbatch, wanted=True)
        return plus(y, self.delta(activated, adapters, SECOND))
