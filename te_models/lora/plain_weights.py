"""Adapters of weights outside of GEMM layers: lookup tables, the output layer, routers, small projections.

They come from folders that peft wrote; `add_lora` makes none. A table [words, H] is adapted as the output layer's
weight is: B has a row for each word, A the H columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.without_autocast import compute_dtype

from ..model.embedding import EmbeddingTable
from ..model.mixers.convolved import HighPrecisionLinear, HighPrecisionRowParallel
from ..model.mixers.output_gate import HeadGate
from ..model.mixers.sparse_attention import HeadWeights
from ..model.moe import Router
from ..model.output import OutputLayer
from .adapter import Adapter
from .layers import FIRST, plus


class PlainAdapter(Adapter):
    """An adapter of a module with one plain weight, whose other attributes are the module's."""

    def __init__(self, base_layer: nn.Module, rank: int, alpha: float, dropout: float, use_dora: bool, *_: Any) -> None:
        kind = type(base_layer).__name__
        if use_dora:
            raise ValueError(f"the adapter of a {kind} has DoRA's lengths; allowed: LoRA, or DoRA of GEMM layers")
        super().__init__(base_layer, rank, alpha, dropout, use_dora)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        rows, columns = self.base_layer.weight.shape
        return ((columns, rows),)

    def weights(self) -> tuple[tuple[str, ...], ...]:
        return (("weight",),)

    def modes(self) -> tuple[str | None, ...]:
        return (None,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(super().__getattr__("base_layer"), name)


class AdaptedTable(PlainAdapter):
    """`weight[ids] + scaling * B[ids] A`."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, S] int64 -> [B, S, H]."""
        return plus(self.base_layer(ids), F.embedding(ids, self.lora_B.weight) @ self.lora_A.weight * self.scaling)


class AdaptedOutputLayer(PlainAdapter):
    """Logits of [W B] and [x, scaling * A x]: the loss is of one GEMM as without an adapter, at the cost of a copy of
    W."""

    @property
    def loss_chunk_tokens(self) -> int | None:
        """As the layer."""
        return self.base_layer.loss_chunk_tokens

    @loss_chunk_tokens.setter
    def loss_chunk_tokens(self, tokens: int | None) -> None:
        self.base_layer.loss_chunk_tokens = tokens

    def forward(self, x: Tensor, shared_weight: Tensor | None, labels: Tensor | None, **options: Any) -> Any:
        """As the layer's."""
        dtype, layer = compute_dtype(x), self.base_layer
        z = self.lora_A.product(x.to(self.lora_A.weight.dtype), self.lora_A.weight, None) * self.scaling
        weight = torch.cat([layer.weight.to(dtype), self.lora_B.weight.to(dtype)], dim=1)
        return layer(torch.cat([x.to(dtype), z.to(dtype)], dim=-1), weight, labels, **options)


class AdaptedRows(PlainAdapter):
    """`x W^T + scaling * (x A^T) B^T`."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., rows]."""
        a, b = self.lora_A.weight, self.lora_B.weight
        return plus(self.base_layer(x), F.linear(F.linear(x.to(a.dtype), a), b) * self.scaling)


class AdaptedWeight(PlainAdapter):
    """A module with `W + scaling * B A` in place of its weight, in the dtype of the factors."""

    def forward(self, *args: Any) -> Tensor:
        """As the module's."""
        return torch.func.functional_call(self.base_layer, {"weight": self._sum(FIRST)}, args)


PLAIN_ADAPTERS: dict[type[nn.Module], type[Adapter]] = {
    EmbeddingTable: AdaptedTable,
    OutputLayer: AdaptedOutputLayer,
    HighPrecisionLinear: AdaptedRows,
    HighPrecisionRowParallel: AdaptedRows,
    Router: AdaptedWeight,
    HeadGate: AdaptedWeight,
    HeadWeights: AdaptedWeight,
}
