"""Operations on quantized values of every kind: made, passed on, written into."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from te_models.kernels.custom_op import Alias, Result, caller, like, operation
from te_models.layers import (
    Float8Quantizer,
    GroupedRows,
    GroupedTensor,
    GroupedTensorStorage,
    QuantizedStorage,
    QuantizedTensor,
    Quantizer,
)
from te_models.layers.dynamo.custom_op import Live, QuantizedResult, quantized_like


class Stored(NamedTuple):
    """A value as `as_tensor` asks, and what it stands for."""

    value: QuantizedTensor | QuantizedStorage
    plain: Tensor


def _stored(x: Tensor, m_splits: Tensor | None, quantizer: Live, as_tensor: bool) -> Stored:
    return Stored(quantized_like(x, quantizer, as_tensor=as_tensor, m_splits=m_splits), like(x))  # type: ignore[arg-type]


@operation("test_quantize", _stored)
def quantize_op(x: Tensor, m_splits: Tensor | None, quantizer: Live, key: Tensor | None, as_tensor: bool) -> Stored:
    """x: [R, C], [G, R, C], or with m_splits [T, C]."""
    if m_splits is not None:
        assert isinstance(quantizer, Quantizer)
        value: Any = GroupedRows.quantize_rows(x, m_splits, quantizer, key)
    else:
        fields = quantizer.quantize_fields(x, key)
        cls = GroupedTensorStorage if x.dim() == 3 else QuantizedStorage
        tensors = list(fields.values())
        described = quantized_like(x, quantizer, as_tensor=as_tensor)
        value = described.make(tensors) if as_tensor else cls.unflatten(tensors, (described.value, x.shape, x.dtype))
    if isinstance(value, QuantizedTensor) and not as_tensor:
        value = value.to_storage()
    return Stored(value, value.dequantize().contiguous())


quantize = caller(quantize_op)


def _live(x: Tensor, quantizer: Float8Quantizer) -> QuantizedResult:
    return quantized_like(x, quantizer, as_tensor=True)


@operation("test_quantize_live", _live)
def quantize_live_op(x: Tensor, quantizer: Float8Quantizer) -> QuantizedTensor:
    """x: [R, C]; what a live quantizer sees is recorded."""
    return quantizer.quantize(x)


quantize_live = caller(quantize_live_op)

Weight = Tensor | QuantizedTensor


class Passed(NamedTuple):
    """The weight quantized, the one that was passed where it was so already; the same again; x w^T."""

    stored: QuantizedTensor
    again: QuantizedTensor
    y: Tensor


def _passed(x: Tensor, weight: Weight, quantizer: Quantizer) -> tuple[Result | Alias, ...]:
    made = Alias("weight") if isinstance(weight, QuantizedTensor) else quantized_like(weight, quantizer, as_tensor=True)
    return Passed(made, Alias(0), like(x, (x.shape[0], weight.shape[0])))  # type: ignore[arg-type]


@operation("test_pass", _passed)
def pass_op(x: Tensor, weight: Weight, quantizer: Quantizer) -> Passed:
    """x: [T, K]; weight: [N, K] plain, or quantized and then handed back."""
    stored = weight if isinstance(weight, QuantizedTensor) else quantizer.quantize(weight)
    return Passed(stored, stored, x @ stored.dequantize().t())


pass_on = caller(pass_op)


@operation("test_fill_cache", lambda: None, mutates=("cache",))
def fill_cache_op(cache: QuantizedStorage | GroupedTensor, weight: Tensor) -> None:
    """Quantize weight into the fields of a cache, as its quantizer says."""
    for name, field in cache.quantizer.quantize_fields(weight).items():
        cache.fields[name].copy_(field)


fill_cache = caller(fill_cache_op)
