"""LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353) of a layer: one adapter that needs nothing but torch.

LoRA adds `s B A` to a weight W [out, in], with A [r, in], B [out, r] and s = alpha / r, without forming the product:
y = W x + s B (A x). DoRA also trains the length m [out] of each row: y = m / |W + s B A| (W x + s B A x), where the
norm of a row is treated as a constant in the backward pass, as the paper does (section 4.3). m begins as the norms of
W, and B as zero, so that a new adapter changes no bit. A, B and m are float32 (float64 where the weights are). The GEMM
with W is what the recipe in force makes it; W may be stored quantized and is not trained.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from te_models import layers
from te_models.layers import LayerNormMLP, QuantizedTensor
from te_models.layers.collectives import all_reduce
from te_models.layers.distributed.tensor_parallel import rank_part
from te_models.layers.gemm.grouped import add_bias_rows
from te_models.layers.module.grouped_linear import GroupedLinear
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.linear import Linear
from te_models.layers.module.weight_cache import forget_cached_weights

from .layers import (
    FIRST,
    AdaptedGroupedLinear,
    AdaptedLayer,
    AdaptedLayerNormLinear,
    AdaptedLayerNormMLP,
    AdaptedLinear,
    check_layer,
    plus,
)
from .rounding import MergeErrors

_NAME = ["lora"]


def magnitude_name(pair: tuple[str, str]) -> str:
    """Return the name of the row lengths beside a pair of factors."""
    return pair[0].removesuffix("A") + "magnitude_vector"


class Adapter(AdaptedLayer):
    """A layer with one adapter. rank: r; alpha: s times r; dropout: the part of an adapter's input that is dropped in
    training; use_dora: train the lengths of the rows, too. experts: (the first of this rank's, how many there are) of
    a `GroupedLinear` whose members are distributed over ranks; None: this rank has all. Raises ValueError for what
    cannot be.

    Where ranks split the layer, a factor is split along with the side of the weight that it stands for: A with the
    columns, B with the rows. What a rank has is its part of what one rank would have drawn."""

    enabled = True
    """Whether the adapter changes what the layer returns; see `without_adapters`."""
    rows: Tensor | None
    """Of the first weight, the rows that the adapter changes, bool [..., out, 1], as B has them; None: all. The other
    rows of B get no gradient, and stay what they are: 0 from the start."""

    def __init__(
        self,
        base_layer: nn.Module,
        rank: int,
        alpha: float,
        dropout: float,
        use_dora: bool,
        experts: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        check_layer(base_layer, "")
        self.base_layer = base_layer
        self.rank, self.alpha, self.use_dora = rank, alpha, use_dora
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.register_buffer("rows", None, persistent=False)
        for pair, (inputs, outputs), names in zip(self.PAIRS, self.sizes(), self.weights(), strict=True):
            weight = getattr(base_layer, names[0])
            new = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
            a, b = self.factor(inputs, rank, **new), self.factor(rank, outputs, **new)
            self._fill(a.weight, self._mode(pair), experts)
            nn.init.zeros_(b.weight)
            setattr(self, pair[0], a)
            setattr(self, pair[1], b)
            if use_dora:
                setattr(self, magnitude_name(pair), nn.Parameter(self._norms(pair)))

    @torch.no_grad()
    def _fill(self, a: nn.Parameter, mode: str | None, experts: tuple[int, int] | None) -> None:
        """Draw a factor A as one rank does, on any device and for layers that another pipeline stage has, too."""
        layer, shape = self.base_layer, list(a.shape)
        rank, ranks = (layer.tp_rank, layer.tp_size) if mode == "row" else (0, 1)
        shape[-1] *= ranks
        if experts is not None:
            shape[0] = experts[1]
        bound = shape[-1] ** -0.5
        drawn = torch.empty(shape, dtype=a.dtype, device="cpu").uniform_(-bound, bound)
        if experts is not None:
            drawn = drawn.narrow(0, experts[0], a.shape[0])
        a.copy_(rank_part(drawn, -1, rank, ranks))

    def _mode(self, pair: tuple[str, str]) -> str | None:
        return self.modes()[self.PAIRS.index(pair)]

    def applied(self, options: dict[str, Any]) -> list[str]:
        return _NAME if self.enabled else []

    def changed(
        self, result: Any, x: Tensor, adapters: list[str], pair: tuple[str, str] = FIRST, m_splits: Tensor | None = None
    ) -> Any:
        delta = self._delta(x, pair, m_splits)
        if not self.use_dora:
            return plus(result, delta)
        y = result[0] if isinstance(result, tuple) else result
        magnitude, bias = getattr(self, magnitude_name(pair)), self._bias(pair)
        if self._mode(pair) == "row":  # every rank has all of it, and uses it for its own tokens, or its part of a sum
            magnitude = self._shared(magnitude)
        ratio = magnitude / self._norms(pair)
        if m_splits is not None:  # a row's own expert; zeros past the last one
            zeros = delta.new_zeros(delta.shape)
            ratio = add_bias_rows(zeros, ratio, m_splits)
            bias = None if bias is None else add_bias_rows(zeros, bias, m_splits)
        product = y if bias is None else y - bias
        return plus(result, (ratio - 1) * product + ratio * delta)

    def _delta(self, x: Tensor, pair: tuple[str, str], m_splits: Tensor | None) -> Tensor:
        """Return `s B A x`. Where ranks split the layer, they exchange the r numbers of each row that are between the
        factors, not rows of x; of a `GroupedLinear`, whose callers gather rows and add up results, nothing.

        The gradient of a factor that every rank has in full is summed over those that used it for something else."""
        a, b, layer, mode = getattr(self, pair[0]), getattr(self, pair[1]), self.base_layer, self._mode(pair)
        of_a = self._shared(a.weight) if mode == "column" else a.weight
        of_b = self._shared(b.weight) if mode == "row" else b.weight
        if self.rows is not None and pair == FIRST:
            of_b = torch.where(self.rows, of_b, of_b.detach())
        z = a.product(self.dropout(x).to(a.weight.dtype), of_a, m_splits)
        if mode is not None and m_splits is None:
            z = layer.whole_rows(z) if mode == "column" else layer.summed(z, None)
        return b.product(z, of_b, m_splits) * self.scaling

    def _shared(self, parameter: Tensor) -> Tensor:
        """Return a parameter that every rank has in full, with the sum of what the ranks' parts of its gradient are."""
        layer = self.base_layer
        return (layer.for_own_features if isinstance(layer, GroupedLinear) else layer.for_own_rows)(parameter)

    def _bias(self, pair: tuple[str, str]) -> Tensor | None:
        """Return the bias in what the layer returns, [out] or [num_gemms, out]: its length is not trained."""
        layer = self.base_layer
        if isinstance(layer, LayerNormMLP):
            return layer.fc1_bias if pair == FIRST else None if layer.return_bias else layer.fc2_bias
        if layer.return_bias:
            return None
        if isinstance(layer, GroupedLinear):
            return None if layer.parallel_mode == "row" else layer._stacked_bias()
        return layer.bias

    def _sum(self, pair: tuple[str, str]) -> Tensor:
        """Return `W + s B A` in the dtype of the factors, [out, in] or [num_gemms, out, in]."""
        a, b = getattr(self, pair[0]).weight, getattr(self, pair[1]).weight
        names = self.weights()[self.PAIRS.index(pair)]
        stored = [getattr(self.base_layer, name) for name in names]
        plain = [w.dequantize(a.dtype) if isinstance(w, QuantizedTensor) else w.to(a.dtype) for w in stored]
        return (plain[0] if len(plain) == 1 else torch.stack(plain)) + (b @ a) * self.scaling

    @torch.no_grad()
    def _norms(self, pair: tuple[str, str]) -> Tensor:
        """Return the lengths of the rows, [out] or [num_gemms, out], of all columns; collective where ranks split
        these."""
        norms = torch.linalg.vector_norm(self._sum(pair), dim=-1)
        if self._mode(pair) != "row" or norms.is_meta:
            return norms
        return all_reduce(norms.square(), self.base_layer.tp_group_name).sqrt()

    @torch.no_grad()
    def merged_weight(self, name: str, weight: Tensor) -> Tensor:
        """Return the layer's weight of this name with the adapter in it, of its value, on whose device: summed in the
        dtype of the factors and rounded once, to the weight's. Of a weight stored quantized a plain one, for the sum
        has no exact quantized form."""
        return self._exact(name, weight)[1].to(weight.dtype)

    def _exact(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weight without and with the adapter, in the dtype of the factors."""
        pair, names = next(its for its in zip(self.PAIRS, self.weights(), strict=True) if name in its[1])
        a, b = (getattr(self, factor).weight.to(weight.device) for factor in pair)
        length = getattr(self, magnitude_name(pair)).to(weight.device) if self.use_dora else None
        if len(names) > 1:  # one member each
            member = names.index(name)
            a, b, length = a[member], b[member], None if length is None else length[member]
        plain = weight.dequantize(a.dtype) if isinstance(weight, QuantizedTensor) else weight.to(a.dtype)
        total = plain + (b @ a) * self.scaling
        if length is not None:
            total = total * (length / torch.linalg.vector_norm(total, dim=-1))[..., None]
        return plain, total

    @torch.no_grad()
    def merge(self, rounded: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to) -> tuple[nn.Module, MergeErrors]:
        """Return the layer with the adapter in its weights, rounded by a function of values and a dtype, and what the
        rounding did. Raises ValueError for DoRA where this rank has a part of each row."""
        if self.use_dora and "row" in self.modes():
            raise ValueError(
                "this rank has a part of each row of the weight, and DoRA merges whole rows; allowed: a whole model, "
                "which load_adapter gives the adapters that a run has written"
            )
        errors = MergeErrors(0.0, 0.0)
        for name in chain.from_iterable(self.weights()):
            weight = getattr(self.base_layer, name)
            plain, exact = self._exact(name, weight)
            merged = rounded(exact, weight.dtype)
            errors = MergeErrors(
                errors.lost + float((merged.double() - exact).square().sum()),
                errors.changed + float((exact.double() - plain).square().sum()),
            )
            if isinstance(weight, QuantizedTensor):
                setattr(self.base_layer, name, nn.Parameter(merged, requires_grad=False))
            else:
                weight.copy_(merged)
        forget_cached_weights(self.base_layer)
        return self.base_layer, errors

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}, use_dora={self.use_dora}"


def adapters_of(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield (name of the layer, adapter) of a model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapter))


class _Linear(AdaptedLinear, Adapter):
    pass


class _LayerNormLinear(AdaptedLayerNormLinear, Adapter):
    pass


class _LayerNormMLP(AdaptedLayerNormMLP, Adapter):
    pass


class _GroupedLinear(AdaptedGroupedLinear, Adapter):
    pass


ADAPTERS: dict[type[nn.Module], type[Adapter]] = {
    Linear: _Linear,
    LayerNormLinear: _LayerNormLinear,
    LayerNormMLP: _LayerNormMLP,
    GroupedLinear: _GroupedLinear,
    layers.Linear: _Linear,
    layers.LayerNormLinear: _LayerNormLinear,
    layers.GroupedLinear: _GroupedLinear,
}
"""Class of a layer, a model's or one that a user built -> class of its adapted one."""
