"""The gated delta rule, with a decay for each head or each channel, and Mamba-2's scan on CPU beside transformers'
functions, and what models of them cost.

    python -m bench.recurrent_rules [--part NAME ...] [--rounds 5] [--update]

RULE    forward and backward of one sequence of 512 or 4,096 tokens, float32, both compiled. transformers' loop over
        chunks is unrolled by the compiler, 64 chunks of 4,096 tokens for longer than the bench may take: there
        the peer is its function compiled for 512 tokens, called for each 512 with the state so far, or the one of
        eager code, whichever is faster. `growth` is our time of 4,096 tokens over that of 512, 8 for a linear cost.
decode  one token with the state so far, eagerly, at the sizes of Qwen3-Next, of Kimi Linear and of Mamba-2 with 2.7
        billion weights.
step    the train step of a small qwen3_next, against transformers' compiled one, as bench.train_step does it, or where
        that does not compute the same losses, its eager one.
first   seconds of processor time until the first train step is done, in a new process with empty caches, of the hybrid
        and of a model of as many layers of attention.

Nothing is timed unless the two results agree. One thread, CPU time, both sides in turn (see `common`);
`speed_of_peer` is the peer's time over ours, median of the rounds. One part takes one to two minutes, but for
gated_delta_by_channel, whose peer takes six to compile; --update writes the parts that ran into the file, each with its
commit.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from bench.common import interleave, ratio, result_file, update_result, versions, write_result
from bench.compile import cold_run
from bench.shapes import HybridShape
from bench.steps import our_step
from bench.train_step import check_losses, peer_step, speeds, summaries
from te_models.kernels.gated_delta import gated_delta_rule, l2_normed
from te_models.kernels.state_space import state_space_scan

NAME = "recurrent_rules"
PACKAGES = ("torch", "transformers")
TARGETS = {"rules": 1.5, "growth": 8.5, "decode": 1.2, "step": 1.2, "first": 1.5}
"""Times as fast as the peer; of `growth` and `first`, the most that the ratio may be."""
TOKENS = (512, 4096)
CALLS = 50
Inputs = tuple[Tensor, ...]


def delta_inputs(
    tokens: int, key_heads: int = 4, heads: int = 8, channels: int = 64, *, by_channel: bool = False
) -> Inputs:
    """q, k, v, g and beta."""
    q, k = (l2_normed(torch.randn(1, tokens, key_heads, channels)) for _ in "qk")
    v, g = torch.randn(1, tokens, heads, channels), torch.randn(1, tokens, heads, *([channels] if by_channel else []))
    return q, k, v, -F.softplus(g), torch.rand(1, tokens, heads)


def delta_in_pieces(compiled: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the function that calls one of 512 tokens for each 512."""

    def run(*inputs: Tensor) -> Tensor:
        state, found = inputs[0].new_zeros(1, 8, 64, 64), []
        for piece in zip(*(x.split(TOKENS[0], 1) for x in inputs), strict=True):
            out, state = compiled(*piece, state)
            found.append(out)
        return torch.cat(found, 1)

    return run


def delta_peers(rule: Callable[..., Any], tokens: int) -> dict[str, Callable[..., Tensor]]:
    """rule: transformers' function."""

    def peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    if tokens == TOKENS[0]:
        return {"compiled": torch.compile(lambda *x: peer(*x, None)[0])}
    return {
        "compiled in pieces": delta_in_pieces(torch.compile(peer)),
        "eager": lambda *x: peer(*x, None)[0],
    }


def scan_inputs(tokens: int, heads: int = 8, states: int = 64) -> Inputs:
    """x, dt, A, B, C and D: heads of 64 channels, one group, steps as models have them at first."""
    x, dt = torch.randn(1, tokens, heads, 64), 10 ** (-1 - 2 * torch.rand(1, tokens, heads))
    b, c = (torch.randn(1, tokens, 1, states) for _ in "BC")
    return x, dt, -torch.linspace(1.0, 8.0, heads), b, c, torch.ones(heads)


def scan_peer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=256, D=D)


RULES: dict[
    str, tuple[Callable[..., Inputs], Callable[..., Any], Callable[[int], dict[str, Callable[..., Tensor]]]]
] = {
    "gated_delta": (
        delta_inputs,
        lambda *x: gated_delta_rule(*x)[0],
        functools.partial(delta_peers, torch_chunk_gated_delta_rule),
    ),
    "gated_delta_by_channel": (
        lambda tokens: delta_inputs(tokens, 8, by_channel=True),
        lambda *x: gated_delta_rule(*x)[0],
        functools.partial(delta_peers, chunk_kimi_delta_attention),
    ),
    "mamba2": (scan_inputs, lambda *x: state_space_scan(*x)[0], lambda _: {"compiled": torch.compile(scan_peer)}),
}


def agree(found: Tensor, wanted: Tensor, what: str) -> None:
    if not (found - wanted).abs().max() <= 1e-4 * wanted.abs().max():
        sys.exit(f"refusing to time: {what} differs from transformers'")


def rule(name: str, rounds: int) -> dict[str, Any]:
    """Compare forward and backward of a rule."""
    make, ours, peers = RULES[name]
    cases: list[dict[str, Any]] = []
    seconds = []
    for tokens in TOKENS:
        torch.manual_seed(0)
        torch._dynamo.reset()
        inputs = tuple(x.requires_grad_() for x in make(tokens))
        sides = {"ours": torch.compile(ours, fullgraph=True, dynamic=False), **peers(tokens)}
        found = {side: run(*inputs).detach() for side, run in sides.items()}
        for side, y in found.items():
            agree(found["ours"], y, f"{name} of {tokens} tokens, {side},")
        dy = torch.randn_like(found["ours"])

        def step(run: Callable[..., Tensor], inputs: Inputs = inputs, dy: Tensor = dy) -> Callable[[], object]:
            return lambda: torch.autograd.grad(run(*inputs), inputs, dy)

        samples = interleave({side: step(run) for side, run in sides.items()}, rounds=rounds, warmup=2)
        best = min((s for s in samples if s != "ours"), key=lambda s: statistics.median(samples[s].cpu))
        speed = ratio(samples[best].cpu, samples["ours"].cpu)
        cases.append(
            {
                "tokens": tokens,
                **summaries(samples),
                "peer": best,
                "speed_of_peer": speed,
                "met": speed["median"] >= TARGETS["rules"],
            }
        )
        seconds.append(samples["ours"].cpu)
        print(name, cases[-1], flush=True)
    growth = ratio(seconds[1], seconds[0])
    growth["met"] = growth["median"] <= TARGETS["growth"]
    print(name, "4,096 over 512 tokens:", growth, flush=True)
    return {"cases": cases, "growth": growth, "rounds": rounds}


def decode(rounds: int) -> dict[str, Any]:
    """Compare one token with the state so far."""
    torch.manual_seed(0)
    delta, scan = delta_inputs(1, 16, 32, 128), scan_inputs(1, 80, 128)
    by_channel = delta_inputs(1, 32, 32, 128, by_channel=True)
    state, of_scan = torch.randn(1, 32, 128, 128), torch.randn(1, 80, 64, 128)
    x, dt, A, B, C, D = scan
    rows = {"A": A[:, None, None].expand(80, 64, 128), "D": D[:, None].expand(80, 64)}

    def peer_scan() -> tuple[Tensor, Tensor]:
        after = of_scan.clone()  # which it overwrites: as much memory as ours, which returns another one
        steps = dt[:, 0, :, None].expand(1, 80, 64)
        return mamba2_selective_state_update(after, x[:, 0], steps, rows["A"], B[:, 0], C[:, 0], rows["D"]), after

    cases: dict[str, dict[str, Callable[[], Any]]] = {
        "gated_delta": {
            "ours": lambda: gated_delta_rule(*delta, initial_state=state),
            "peer": lambda: torch_recurrent_gated_delta_rule(*delta, state, True),
        },
        "gated_delta_by_channel": {
            "ours": lambda: gated_delta_rule(*by_channel, initial_state=state),
            "peer": lambda: recurrent_kimi_delta_attention(*by_channel, state, True),
        },
        "mamba2": {"ours": lambda: state_space_scan(*scan, initial_state=of_scan), "peer": peer_scan},
    }
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, sides in cases.items():
            ours, peer = (sides[side]() for side in ("ours", "peer"))
            for a, b in zip(ours, peer, strict=True):
                agree(a.reshape(b.shape), b, f"a token of {name}")
            samples = interleave({side: _repeat(run) for side, run in sides.items()}, rounds=rounds)
            speed = ratio(samples["peer"].cpu, samples["ours"].cpu)
            us = {side: round(1e6 * statistics.median(s.cpu) / CALLS, 1) for side, s in samples.items()}
            found[name] = {"us": us, "speed_of_peer": speed, "met": speed["median"] >= TARGETS["decode"]}
            print(name, found[name], flush=True)
    return found


def _repeat(run: Callable[[], object]) -> Callable[[], None]:
    def many() -> None:
        for _ in range(CALLS):
            run()

    return many


def step(rounds: int) -> dict[str, Any]:
    """Compare train steps."""
    shape = HybridShape("qwen3_next-512", hidden=512, layers=4, ffn=1408, batch=2, sequence=256)
    with tempfile.TemporaryDirectory() as scratch:
        folder, ids = Path(scratch), shape.input_ids()
        shape.write_random_model(folder)
        for kind in ("compiled", "eager"):
            sides = {
                "ours": our_step(folder, ids, compiled=True, with_torch_adamw=True),
                "peer": peer_step(folder, ids, compiled=kind == "compiled", experts=None),
            }
            try:
                losses = check_losses(sides)
                break
            except SystemExit as refused:  # torch 2.13 compiles this model of transformers to one whose loss is NaN
                print(f"{kind} peer: {refused}", flush=True)
        else:
            sys.exit("refusing to time: neither form of the peer computes what ours does")
        samples = interleave(sides, rounds=rounds, warmup=1)
    speed = speeds(samples, "ours", "peer")
    found = {
        "shape": shape.to_dict(),
        "peer": kind,
        "losses": losses,
        "step": summaries(samples),
        "speed_of_peer": speed["cpu"],
    }
    found["met"] = speed["cpu"]["median"] >= TARGETS["step"]
    print(found, flush=True)
    return found


def first(rounds: int) -> dict[str, Any]:
    """Compare the first train steps of new processes."""
    common = {"hidden": 256, "layers": 4, "ffn": 704, "batch": 2, "sequence": 128}
    hybrid, attention = (HybridShape("first", **common, interval=n) for n in (4, 1))  # type: ignore[arg-type]
    seconds = {name: cold_run(s, "block")[0][1] for name, s in {"hybrid": hybrid, "attention": attention}.items()}
    over = round(seconds["hybrid"] / seconds["attention"], 3)
    found = {"cpu_s": seconds, "hybrid_over_attention": over, "met": over <= TARGETS["first"]}
    print(found, flush=True)
    return found


PARTS = {name: functools.partial(rule, name) for name in RULES} | {"decode": decode, "step": step, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", choices=PARTS, action="append", help="this one only, several times for several")
    parser.add_argument("--update", action="store_true", help="write these parts to the file, each with its commit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = {name: PARTS[name](options.rounds) for name in options.part or PARTS}
    if options.update and result_file(NAME).exists():
        print(f"written to {update_result(NAME, parts, PACKAGES)}")
    elif options.update or len(parts) == len(PARTS):
        payload = {"versions": versions(*PACKAGES), "targets": TARGETS, **parts}
        print(f"written to {write_result(NAME, payload)}")


if __name__ == "__main__":
    main()
