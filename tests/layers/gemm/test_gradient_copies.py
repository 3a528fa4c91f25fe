"""A CPU's backward pass has one quantized copy of a gradient in memory at a time."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.layers import Linear, autocast
from te_models.layers.gemm import three_gemms
from tests.layers.matrix_recipes import fresh


@pytest.mark.parametrize(("name", "copies"), [("block", 2), ("mxfp8", 2), ("nvfp4", 2), ("current", 0)])
def test_one_copy_ends_before_the_next_begins(name: str, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both GEMMs have the same numbers, one copy is for both."""
    made: list[weakref.ref[Tensor]] = []
    real = three_gemms.quantized_operand
    x = torch.randn(64, 32, requires_grad=True)
    with autocast(recipe=fresh(name)):
        y = Linear(32, 48)(x)

    def quantized_operand(*arguments: Any) -> Any:
        assert all(before() is None for before in made), "the copy for dgrad is still there"
        operand = real(*arguments)
        if arguments[1].shape == y.shape:
            made.append(weakref.ref(operand.values))
        return operand

    monkeypatch.setattr(three_gemms.OneMatrix, "operand", staticmethod(quantized_operand))
    y.backward(torch.randn_like(y))
    assert len(made) == copies and x.grad is not None
