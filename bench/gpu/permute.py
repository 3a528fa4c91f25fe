"""Permute and unpermute against their byte floor, and against torch's gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from te_models.kernels.permute import permute, sort_by_expert, unpermute

from .case import Case, nbytes, near, same_bits
from .shapes import Shapes

# bfloat16 results of sums in float32; torch rounds each product as well
LIMIT = 2.0**-7


def cases(device: torch.device, shapes: Shapes) -> Iterator[Callable[[], Case]]:
    """Yield what builds each case."""
    tokens, top_k, hidden, experts = shapes.permute
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    weights = torch.rand(tokens, top_k, device=device)
    indices = torch.rand(tokens, experts, device=device).topk(top_k).indices
    order = sort_by_expert(indices, experts)
    token_of_row = order.slot_of_row // top_k
    label = f"{tokens} tokens to {top_k} of {experts}, {hidden}"

    def moved() -> Case:
        y = permute(x, order)
        return Case(
            f"permute {label}",
            {"ours": lambda: permute(x, order), "torch": lambda: x[token_of_row]},
            lambda results: same_bits(results, [x[token_of_row]]),
            nbytes(x, y, order.row_of_slot),
            over={"ours": ("torch",)},
        )

    def summed() -> Case:
        y = permute(x, order)
        rows = order.row_of_slot.view(tokens, top_k)
        return Case(
            f"unpermute {label}",
            {
                "ours": lambda: unpermute(y, order, weights),
                "torch": lambda: (y[rows] * weights[..., None]).sum(1).to(y.dtype),
            },
            lambda results: near(results, "torch", {"ours": LIMIT}),
            nbytes(x, y, weights, order.row_of_slot),
            over={"ours": ("torch",)},
        )

    def sorted_slots() -> Case:
        expected = sort_by_expert(indices.cpu(), experts)
        return Case(
            f"sort by expert {label}",
            {"ours": lambda: sort_by_expert(indices, experts)[:2]},
            lambda results: same_bits(results, [field.to(device) for field in expected[:2]]),
            nbytes(indices, order.slot_of_row, order.row_of_slot),
        )

    yield from (moved, summed, sorted_slots)
