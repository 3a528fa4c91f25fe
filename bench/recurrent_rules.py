"""The gated delta rule and Mamba-2's scan on CPU, forward and backward, beside transformers' functions in torch.

    python -m bench.recurrent_rules [--rounds 5]

Float32, compiled both, one sequence of 512 or 4,096 tokens. Nothing is timed unless the two results agree. One thread,
CPU time, both sides in turn (see `common`); `speed_of_peer` is the peer's time over ours, median of the rounds, and
`growth` our time of 4,096 tokens over that of 512, 8 for a cost that is linear.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from bench.common import interleave, ratio, versions, write_result
from te_models.kernels.gated_delta import gated_delta_rule, l2_normed
from te_models.kernels.state_space import state_space_scan

TOKENS = (512, 4096)
Inputs = tuple[Tensor, ...]


def delta_inputs(tokens: int) -> Inputs:
    """Four key heads and eight value heads of 64 channels."""
    q, k = (l2_normed(torch.randn(1, tokens, 4, 64)) for _ in "qk")
    v, g = torch.randn(1, tokens, 8, 64), -F.softplus(torch.randn(1, tokens, 8))
    return q, k, v, g, torch.rand(1, tokens, 8)


def delta_peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


def scan_inputs(tokens: int) -> Inputs:
    """Eight heads of 64 channels, one group, 64 states."""
    x, dt = torch.randn(1, tokens, 8, 64), F.softplus(torch.randn(1, tokens, 8))
    b, c = (torch.randn(1, tokens, 1, 64) for _ in "BC")
    return x, dt, -torch.arange(1.0, 9.0), b, c, torch.ones(8)


def scan_peer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=256, D=D)


RULES: dict[str, tuple[Callable[[int], Inputs], Callable[..., Any], Callable[..., Tensor]]] = {
    "gated_delta": (delta_inputs, lambda *x: gated_delta_rule(*x)[0], delta_peer),
    "mamba2": (scan_inputs, lambda *x: state_space_scan(*x)[0], scan_peer),
}


def measure(name: str, tokens: int, rounds: int) -> tuple[dict[str, Any], list[float]]:
    """Compare the two on one size; return our seconds of each round, too."""
    make, ours, peer = RULES[name]
    torch.manual_seed(0)
    inputs = tuple(x.requires_grad_() for x in make(tokens))
    sides = {"ours": torch.compile(ours, fullgraph=True), "peer": torch.compile(peer)}
    found = [side(*inputs).detach() for side in sides.values()]
    if not (found[0] - found[1]).abs().max() <= 1e-4 * found[1].abs().max():
        sys.exit(f"refusing to time: {name} of {tokens} tokens differs from transformers'")
    dy = torch.randn_like(found[0])

    def step(side: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(side(*inputs), inputs, dy)

    samples = interleave({name: step(side) for name, side in sides.items()}, rounds=rounds, warmup=1)
    case = {
        "rule": name,
        "tokens": tokens,
        **{side: s.summary() for side, s in samples.items()},
        "speed_of_peer": ratio(samples["peer"].cpu, samples["ours"].cpu),
    }
    return case, samples["ours"].cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rule", choices=RULES, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases, growth = [], {}
    for name in options.rule or RULES:
        ours = []
        for tokens in TOKENS:
            case, seconds = measure(name, tokens, options.rounds)
            cases.append(case)
            ours.append(seconds)
            print(case, flush=True)
        growth[name] = ratio(ours[1], ours[0])
        print(name, growth[name], flush=True)
    write_result("recurrent_rules", {"versions": versions("torch", "transformers"), "cases": cases, "growth": growth})


if __name__ == "__main__":
    main()
