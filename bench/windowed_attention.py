"""Attention in a sliding window, and with sinks, on CPU, forward and backward, beside transformers' under a mask.

    python -m bench.windowed_attention [--rounds 5]

Eight heads of 64 channels over two key heads, one sequence. The peer computes all queries with all keys under a mask,
as transformers 5 does on a CPU: torch's scaled_dot_product_attention, and its own eager functions for soft-capped
scores (gemma2) and sinks (gpt_oss). Nothing is timed unless the two results agree. One thread, CPU time, both sides in
turn (see `common`); `speed_of_peer` is the peer's time over ours, median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcapped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from bench.common import interleave, ratio, versions, write_result
from te_models.layers import DotProductAttention

N, G, D = 8, 2, 64
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 50.0}, "sinks": {"softmax_type": "learnable"}}
SIZES = ((1024, 128), (4096, 128), (4096, 512), (4096, 1024), (4096, 4096))
"""Tokens, and how many of them a query sees; all of them with sinks alone, which torch's kernels do not have."""


def peer(kind: str, layer: DotProductAttention, tokens: int, window: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return transformers' attention of [B, S, heads, D] under a mask that was made before."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    visible = ((distance >= 0) & (distance < window))[None, None]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
    module = SimpleNamespace(num_key_value_groups=N // G, training=True, is_causal=True, sinks=layer.softmax_offset)
    function, given, options = {
        "plain": (sdpa_attention_forward, visible, {}),
        "softcap": (softcapped, mask, {"softcap": layer.softcap}),
        "sinks": (with_sinks, mask, {}),
    }[kind]

    def run(*inputs: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in inputs)
        return function(module, q, k, v, given, scaling=D**-0.5, **options)[0].flatten(2)

    return run


def measure(kind: str, tokens: int, window: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Compare the two on one size."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "causal"}
    options |= {"window_size": window} if window < tokens else {}
    layer = DotProductAttention(N, D, G, **options, **KINDS[kind], params_dtype=dtype)
    if layer.softmax_offset is not None:
        torch.nn.init.normal_(layer.softmax_offset)
    inputs = [torch.randn(1, tokens, heads, D, dtype=dtype, requires_grad=True) for heads in (N, G, G)]
    dy = torch.randn(1, tokens, N * D, dtype=dtype)
    sides = {"ours": layer, "peer": peer(kind, layer, tokens, window, dtype)}
    found = [side(*inputs).detach().float() for side in sides.values()]
    limit = 0.02 if dtype is torch.bfloat16 else 1e-4
    if not (found[0] - found[1]).abs().max() <= limit * found[1].abs().max():
        sys.exit(f"refusing to time: {kind} with {tokens} tokens and {window} of window differs from transformers'")

    def step(side: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(side(*inputs), inputs, dy)

    samples = interleave({name: step(side) for name, side in sides.items()}, rounds=rounds, warmup=1)
    return {
        "kind": kind,
        "tokens": tokens,
        "window": window,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: s.summary() for name, s in samples.items()},
        "speed_of_peer": ratio(samples["peer"].cpu, samples["ours"].cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    cases = []
    for kind in KINDS:
        for tokens, window in SIZES:
            for dtype in (torch.bfloat16, torch.float32) if window < tokens or kind == "sinks" else ():
                cases.append(measure(kind, tokens, window, dtype, rounds))
                print(cases[-1], flush=True)
    details = {"versions": versions("torch", "transformers"), "load_average": [round(x, 1) for x in os.getloadavg()]}
    print(f"wrote {write_result('windowed_attention', details | {'rounds': rounds, 'cases': cases})}")


if __name__ == "__main__":
    main()
