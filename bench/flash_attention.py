"""Attention without a mask on CPU beside torch's scaled_dot_product_attention, forward and with its backward pass.

    python -m bench.flash_attention [--rounds 9]

One sequence, causal, queries, keys and values as a projection leaves them, [1, tokens, heads, channels]; heads that
share keys do so on both sides (`enable_gqa`). Nothing is timed unless the two results agree. One thread, CPU time, both
sides in turn (see `common`); `speed_of_torch` is torch's time over ours, median of the rounds. Documents in one row are
compared with the same operation on torch's kernel, a call for each document.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import interleave, ratio, versions, write_result
from te_models.kernels.flash_attention import op as ours
from te_models.kernels.packed_attention import packed_attention
from te_models.layers import DotProductAttention

HEADS = ((9, 3, 64), (8, 8, 64), (32, 8, 128))
"""Query heads, key heads, channels."""
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
DOCUMENTS = ((1024, 128), (4096, 512))
"""Tokens of a row, and of each of its documents, of the first heads."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(sides: dict[str, Attend], heads: tuple[int, int, int], tokens: int, dtype: torch.dtype, rounds: int) -> Any:
    """Compare both sides on one size, forward alone and with the backward pass."""
    torch.manual_seed(0)
    queries, keys, channels = heads
    inputs = [torch.randn(1, tokens, n, channels, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]
    dy = torch.randn(1, tokens, queries * channels, dtype=dtype)

    def both_passes(side: Attend) -> tuple[Tensor, ...]:
        y = side(*inputs)
        return y, *torch.autograd.grad(y, inputs, dy)

    limit = 0.04 if dtype is torch.bfloat16 else 1e-4  # torch adds gradients of bfloat16 keys up in bfloat16
    for found, wanted in zip(*(both_passes(side) for side in sides.values()), strict=True):
        if not (found.float() - wanted.float()).abs().max() <= limit * wanted.float().abs().max():
            sys.exit(f"refusing to time: {heads} heads with {tokens} tokens differ from torch's")

    def without_gradients(side: Attend) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                side(*inputs)

        return run

    case: dict[str, Any] = {"heads": heads, "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
    runs = {
        "forward": {name: without_gradients(side) for name, side in sides.items()},
        "both_passes": {name: lambda side=side: both_passes(side) for name, side in sides.items()},
    }
    for kind, both in runs.items():
        samples = interleave(both, rounds=rounds, warmup=1)
        case[kind] = {name: s.summary() for name, s in samples.items()}
        case[kind]["speed_of_torch"] = ratio(samples["torch"].cpu, samples["ours"].cpu)
    return case


def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared).transpose(1, 2).flatten(2)


def of_documents(tokens: int, length: int) -> dict[str, Attend]:
    """Return attention within documents of so many tokens with our kernel, and with torch's."""
    documents = (torch.arange(tokens) // length)[None]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return packed_attention(q, k, v, documents, scale=q.shape[-1] ** -0.5).transpose(1, 2).flatten(2)

    class WithTorchs(torch.autograd.Function):
        """The same, with torch's kernel in both passes."""

        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            with torch.enable_grad(), mock.patch.dict(ours.FEWEST, dict.fromkeys(ours.FEWEST, tokens + 1)):
                ctx.inputs = [x.detach().requires_grad_() for x in inputs]
                ctx.y = run(*ctx.inputs)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
            with mock.patch.dict(ours.FEWEST, dict.fromkeys(ours.FEWEST, tokens + 1)):
                return torch.autograd.grad(ctx.y, ctx.inputs, dy)

    return {"ours": run, "torch": WithTorchs.apply}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    cases, packed = [], []
    for heads in HEADS:
        layer = DotProductAttention(heads[0], heads[2], heads[1], qkv_format="bshd")
        for tokens in TOKENS:
            for dtype in (torch.bfloat16, torch.float32):
                cases.append(measure({"ours": layer, "torch": of_torch}, heads, tokens, dtype, rounds))
                print(cases[-1], flush=True)
    for tokens, length in DOCUMENTS:
        for dtype in (torch.bfloat16, torch.float32):
            packed.append(measure(of_documents(tokens, length), HEADS[0], tokens, dtype, rounds) | {"document": length})
            print(packed[-1], flush=True)
    details = {"versions": versions("torch"), "load_average": [round(x, 1) for x in os.getloadavg()], "rounds": rounds}
    print(f"wrote {write_result('flash_attention', details | {'cases': cases, 'documents': packed})}")


if __name__ == "__main__":
    main()
