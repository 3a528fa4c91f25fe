"""What tests compare: bits, distances, and the sentences of errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import te_models.checkpoints.mapping.stream as move
from te_models.checkpoints.io.boxes import element_count
from te_models.layers import QuantizedTensor


def refused(call: Callable[[], object], *words: str, error: type[BaseException] = ValueError) -> None:
    """Assert that a call raises an error whose sentence has these words."""
    with pytest.raises(error) as raised:
        call()
    assert all(word in str(raised.value) for word in words), str(raised.value)


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference against the largest entry."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9))


ROUNDED = 64 * 2.0**-24
"""A sum of three float32 numbers in another order, passed through two layers."""


def the_same(got: Tensor, expected: Tensor, exact: bool, what: str, limit: float = ROUNDED) -> None:
    """exact: to the last bit; otherwise to `limit` of the largest entry."""
    if exact:
        assert torch.equal(got, expected), f"{what}: {distance(got, expected):.1e}"
    else:
        assert distance(got, expected) <= limit, f"{what}: {distance(got, expected):.1e}"


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether no entry differs by more than a sum of float32 numbers in another order may."""
    return bool((got - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(min=1e-3))


class Reads:
    """Counts the bytes of tensors that are read while it is active."""

    def __enter__(self) -> Reads:
        self.bytes, self._read, self._in_place = 0, move.read_piece, move._read_in_place

        def read(store, piece):
            found = self._read(store, piece)
            self.bytes += found.numel() * found.element_size()
            return found

        def read_in_place(store, piece, out):
            done = self._in_place(store, piece, out)
            self.bytes += element_count(piece.box) * out.element_size() if done else 0
            return done

        move.read_piece, move._read_in_place = read, read_in_place
        return self

    def __exit__(self, *_: object) -> None:
        move.read_piece, move._read_in_place = self._read, self._in_place


def in_dtype(x: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """The same fields with another logical dtype, as a converted module has them."""
    return x.map_fields(lambda field: field, dtype)


def raw(field: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return field.detach().contiguous().flatten().view(torch.uint8)


def same_bits(a: QuantizedTensor, b: QuantizedTensor | dict[str, torch.Tensor]) -> bool:
    """Whether two quantized tensors, or a tensor and fields, have the same fields."""
    other = b.fields if isinstance(b, QuantizedTensor) else b
    return a.fields.keys() == other.keys() and all(torch.equal(raw(f), raw(other[n])) for n, f in a.fields.items())
