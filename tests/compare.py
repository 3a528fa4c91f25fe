"""What tests compare: bits, distances, and the sentences of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import te_models.checkpoints.mapping.stream as move
from te_models import GPTModel, KVCache, StaticKVCache
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


@torch.no_grad()
def assert_decodes(model: GPTModel, ids: Tensor, prompt: int) -> None:
    """Assert that a text in pieces, and twice token by token behind a prompt, has the logits of the whole text.

    ids: [batch, tokens]; prompt: how many of the tokens, at most two less than all."""
    whole, (batch, length) = model(ids).logits, ids.shape
    cache, static = KVCache(model.config, batch, length), StaticKVCache(model.config, batch, 2 * length)
    pieces = ids.split([prompt, 1, 1, length - prompt - 2], dim=1)
    assert distance(torch.cat([model(part, cache=cache).logits for part in pieces], dim=1), whole) <= 1e-5
    assert cache.nbytes > 0
    for _ in range(2):
        assert distance(model(ids[:, :prompt], cache=static).logits, whole[:, :prompt]) <= 1e-5
        for t in range(prompt, length):
            step = model(ids[:, t : t + 1], position_ids=torch.full((batch, 1), t), cache=static.step)
            assert distance(step.logits[:, -1], whole[:, t]) <= 1e-5
            static.step.position.add_(1)
        static.reset()
    cache.reset()
    assert distance(model(ids, cache=cache).logits, whole) <= 1e-5


class Operations(TorchDispatchMode):
    """Notes the operations that run while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func)
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Notes the most elements that a result of an operation has; dtype: of the results in it."""

    elements = 0

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        counted = [t for t in tree_leaves(found) if isinstance(t, Tensor) and self.dtype in (None, t.dtype)]
        self.elements = max([self.elements, *(t.numel() for t in counted)])
        return found


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
