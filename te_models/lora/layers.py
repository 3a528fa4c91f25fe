"""A GEMM layer with adapters in its place: what it computes, and what models read of it.

The layer and its adapter see the same input: the input of `Linear`, the normalised input of `LayerNormLinear` and of
the first weight of `LayerNormMLP`, the activated hidden values for its second one, and each expert's rows for
`GroupedLinear`. Which adapters are active, and what they add, is said by subclasses: ours (`adapter.py`), and those
that peft makes (`te_models.hf.lora`).
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.kernels.permute import Permutation, permute
from te_models.kernels.without_autocast import compute_dtype
from te_models.layers import LayerNormMLP, QuantizedTensor
from te_models.layers.module.base import QuantizedModule
from te_models.layers.module.grouped_linear import GroupedLinear
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.linear import Linear

from ..model.moe import MoELayer

LAYERS: tuple[type[QuantizedModule], ...] = (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear)
"""The layers that adapters exist for."""
FIRST, SECOND = ("lora_A", "lora_B"), ("lora_fc2_A", "lora_fc2_B")
"""Names of the factors of a layer's weight, and of the second weight of a `LayerNormMLP`."""


def check_layer(layer: nn.Module, name: str) -> None:
    """Raise ValueError for a layer whose weight is joined of several parameters."""
    if getattr(layer, "weight_is_joined", False):
        raise ValueError(f"{name or type(layer).__name__} has parameters_split; allowed: layers with one weight")


def check_undivided(layer: nn.Module, name: str) -> None:
    """Raise ValueError for a layer that is split over ranks."""
    if getattr(layer, "tp_size", 1) > 1:
        raise ValueError(
            f"{name or type(layer).__name__} is split over {layer.tp_size} ranks, and adapters are not; allowed: a "
            "model without tensor parallelism"
        )


def check_experts_are_local(model: nn.Module) -> None:
    """Raise ValueError for a model whose experts are distributed over ranks."""
    for module in model.modules():
        if isinstance(module, MoELayer) and module.expert_model_parallel_size > 1:
            raise ValueError(
                f"the experts are distributed over {module.expert_model_parallel_size} ranks, and adapters are not; "
                "allowed: a model without expert parallelism"
            )


class Factor(nn.Linear):
    """weight: [out, in], without a bias; whoever makes it fills it."""

    def __init__(self, inputs: int, outputs: int, **new: Any) -> None:
        super().__init__(inputs, outputs, bias=False, **new)

    def reset_parameters(self) -> None:
        """Draw nothing: a rank's part of a factor would draw fewer numbers than the factor."""

    def product(self, x: Tensor, weight: Tensor, m_splits: Tensor | None) -> Tensor:
        """x: [..., in] -> [..., out], with what `weight` is of the parameter: the parameter, with another gradient."""
        return F.linear(x, weight)


class GroupedFactor(nn.Module):
    """weight: [num_gemms, out, in], one factor for each member."""

    def __init__(self, num_gemms: int, inputs: int, outputs: int, **new: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_gemms, outputs, inputs, **new))

    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
        """x: [T, in], rows sorted by member; m_splits: [num_gemms] -> [T, out]; rows past the last member are zero."""
        return self.product(x, self.weight, m_splits)

    def product(self, x: Tensor, weight: Tensor, m_splits: Tensor | None) -> Tensor:
        """As `Factor.product`, of rows as `forward` takes them."""
        assert m_splits is not None, "a stack has rows of each member"
        dtype = compute_dtype(x)
        return grouped_gemm(x.to(dtype), weight.to(dtype), m_splits)


def plus(result: Any, delta: Tensor) -> Any:
    """Return what a layer returned, its output plus `delta` and rounded to its dtype; what comes with it stays."""
    if isinstance(result, tuple):
        return (plus(result[0], delta), *result[1:])
    return (result + delta).to(result.dtype)


class AdaptedLayer(nn.Module):
    """A layer of ours with adapters. PAIRS: of each weight that is adapted, the names of its factors."""

    PAIRS: ClassVar[tuple[tuple[str, str], ...]] = (FIRST,)

    base_layer: Any

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return (in, out) of the weight of each pair."""
        return ((self.base_layer.in_features, self.base_layer.out_features),)

    def weights(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters that hold the weight of each pair; several hold one member each."""
        return (self.base_layer.weight_names(),)

    def modes(self) -> tuple[str | None, ...]:
        """Return how ranks split the weight of each pair: "column" by rows, "row" by columns, or not at all."""
        return (self.base_layer.parallel_mode,)

    def factor(self, inputs: int, outputs: int, **new: Any) -> Any:
        """Return a new factor, whose `weight` is [outputs, inputs] or a stack of such."""
        return Factor(inputs, outputs, **new)

    def applied(self, options: dict[str, Any]) -> list[str]:
        """Return the names of the adapters of a call with these options, and take out those that the layer lacks."""
        raise NotImplementedError

    def changed(
        self, result: Any, x: Tensor, adapters: list[str], pair: tuple[str, str] = FIRST, m_splits: Tensor | None = None
    ) -> Any:
        """Return what the layer returned for x, with what the adapters change. m_splits: of a `GroupedLinear`."""
        raise NotImplementedError

    # --- what models read of a layer ---------------------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """As the layer."""
        return self.base_layer.tp_size

    @property
    def tp_rank(self) -> int:
        """As the layer."""
        return self.base_layer.tp_rank

    def whole_rows(self, x: Tensor) -> Tensor:
        """As the layer."""
        return self.base_layer.whole_rows(x)

    def for_own_features(self, x: Tensor) -> Tensor:
        """See `TensorParallelModule`."""
        return self.base_layer.for_own_features(x)

    def summed(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer."""
        return self.base_layer.summed(y, bias)

    def summed_for_all(self, x: Tensor) -> Tensor:
        """As the layer."""
        return self.base_layer.summed_for_all(x)

    def weight_names(self) -> tuple[str, ...]:
        """As the layer."""
        return self.base_layer.weight_names()


class AdaptedLinear(AdaptedLayer):
    """`y = x w^T + b + scaling * (x A^T) B^T`, on a `Linear`."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's: x: [..., in_features] -> [..., out_features]."""
        adapters = self.applied(options)
        y = self.base_layer(x, *args, **options)
        return self.changed(y, x, adapters) if adapters else y


class AdaptedLayerNormLinear(AdaptedLayer):
    """The same on a `LayerNormLinear`, with norm(x) in place of x: what the weight is multiplied with."""

    @property
    def layer_norm_weight(self) -> Tensor | None:
        """As the layer."""
        return self.base_layer.layer_norm_weight

    @property
    def eps(self) -> float:
        """As the layer."""
        return self.base_layer.eps

    @property
    def cast_order(self) -> Any:
        """As the layer."""
        return self.base_layer.cast_order

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's: x: [..., in_features] -> [..., out_features]."""
        adapters = self.applied(options)
        if not adapters:
            return self.base_layer(x, *args, **options)
        y, normed = self.base_layer.forward_with_norm(x, *args, **options)
        assert normed is not None, "it was asked for"
        return self.changed(y, normed, adapters)


class AdaptedLayerNormMLP(AdaptedLayer):
    """On a `LayerNormMLP`: `lora_A` and `lora_B` belong to fc1, `lora_fc2_A` and `lora_fc2_B` to fc2; the rank is that
    of both."""

    PAIRS: ClassVar[tuple[tuple[str, str], ...]] = (FIRST, SECOND)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        fc1, fc2 = self.base_layer.fc1_weight, self.base_layer.fc2_weight
        return (fc1.shape[1], fc1.shape[0]), (fc2.shape[1], fc2.shape[0])

    def weights(self) -> tuple[tuple[str, ...], ...]:
        return ("fc1_weight",), ("fc2_weight",)

    def modes(self) -> tuple[str | None, ...]:
        return ("column", "row") if self.base_layer.set_parallel_mode else (None, None)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        """As the layer's: x: [..., hidden_size] -> [..., hidden_size]."""
        adapters, layer = self.applied(options), self.base_layer
        if not adapters:
            return layer(x, is_first_microbatch)
        hidden, normed = layer.forward_fc1(x, is_first_microbatch)
        hidden = self.changed(hidden, normed, adapters)
        y, activated = layer.forward_fc2(hidden, normed, is_first_microbatch, wanted=True)
        return self.changed(y, activated, adapters, SECOND)


class AdaptedGroupedLinear(AdaptedLayer):
    """`y[g] = x[g] w[g]^T + b[g] + scaling * (x[g] A[g]^T) B[g]^T`, on a `GroupedLinear`; A: [num_gemms, r, in], B:
    [num_gemms, out, r]. Each expert has its own rank-r product."""

    def factor(self, inputs: int, outputs: int, **new: Any) -> Any:
        return GroupedFactor(self.base_layer.num_gemms, inputs, outputs, **new)

    def row_align(self, device: torch.device) -> int:
        """1: adapters read the rows in high precision, so these are made before any of them is quantized."""
        return 1

    def with_bias(self, y: Tensor, m_splits: Tensor, *, partial: bool = False) -> Tensor:
        """As the layer."""
        return self.base_layer.with_bias(y, m_splits, partial=partial)

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
        return self.changed(y, rows, adapters, FIRST, m_splits)
