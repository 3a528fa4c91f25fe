"""What each process of test_compile_ranks does: `python -m tests.te_models.compile_ranks_cases CASE RESULTS`."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models import GPTModel, RouterConfig, compile_model
from te_models.compile_ranks import MissingRanksError
from tests.te_models.configs import VARIANTS, tiny_moe, token_ids

STEPS = ((9, 9), (9, 14), (9, 14), (3, 30), (17, 2), (9, 9))
"""Tokens per sequence in each step, on even and odd ranks: alike at first, then not, then different again."""


class Graphs:
    """A backend that notes which graphs it compiled. Names of values and their count, not memory addresses."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        text = "\n".join(
            f"{node.op} {getattr(node.target, '__name__', node.target)} {len(node.args)}" for node in graph.graph.nodes
        )
        self.seen.append(hashlib.sha256(text.encode()).hexdigest())
        return lookup_backend("aot_eager")(graph, inputs)


def build(kind: str) -> GPTModel:
    """Equal on every rank."""
    torch.manual_seed(0)
    if kind == "dense":
        return GPTModel(VARIANTS["dense"])
    model = GPTModel(tiny_moe(RouterConfig(score="sigmoid", expert_bias=True)))
    if dist.get_rank() == 0:  # here no token ever goes to the first expert, nor to the last
        for layer in model.decoder.layers:
            layer.mlp.router.expert_bias.copy_(torch.tensor([-9.0, 9.0, 9.0, -9.0]))
    return model


def train(kind: str, mode: str, late: bool = False) -> dict[str, Any]:
    """Train on shapes that differ between the ranks."""
    rank, graphs = dist.get_rank(), Graphs()
    model = compile_model(build(kind), mode, backend=graphs, timeout_s=60)
    for step, lengths in enumerate(STEPS):
        if late and rank == 1:
            time.sleep(3 if step < 2 else 0)
        ids = token_ids(2, lengths[rank % 2], seed=10 * step + rank)
        model.zero_grad()
        model(ids, labels=ids, return_logits=False).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.05 * parameter.grad / dist.get_world_size()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"graphs": graphs.seen, "parameters": digest}


def desert(kind: str) -> dict[str, Any]:
    """Rank 1 calls the model once less than the others, and waits at the end."""
    model = compile_model(build(kind), backend=Graphs(), timeout_s=10)
    ids = token_ids(2, 9)
    model(ids)
    if dist.get_rank() == 1:
        return {"error": None}
    try:
        model(ids)
    except MissingRanksError as error:
        return {"error": str(error)}
    return {"error": "no error"}


def absent(kind: str) -> dict[str, Any]:
    """Rank 1 never calls the model, so that the others wait for it while they compile."""
    model = compile_model(build(kind), backend=Graphs(), timeout_s=10)
    if dist.get_rank() == 1:
        return {"error": None}
    try:
        model(token_ids(2, 9))
    except MissingRanksError as error:
        return {"error": str(error)}
    return {"error": "no error"}


CASES = {
    "dense": lambda: train("dense", "whole"),
    "moe": lambda: train("moe", "whole"),
    "block": lambda: train("moe", "block"),
    "late": lambda: train("dense", "whole", late=True),
    "desert": lambda: desert("dense"),
    "absent": lambda: absent("dense"),
}


def main(cases: str, results: str) -> None:
    """Run the cases, separated by commas, on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    outcomes = {}
    for case in cases.split(","):
        torch._dynamo.reset()
        outcomes[case] = CASES[case]()
    Path(f"{results}.{dist.get_rank()}").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
