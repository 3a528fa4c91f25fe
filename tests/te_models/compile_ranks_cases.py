"""What each process of test_compile_ranks does:
`python -m tests.te_models.compile_ranks_cases RESULTS CASES BACKEND`, with the names of the cases separated by commas.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models import GPTModel, RouterConfig, compile_model
from te_models.compile.ranks import MissingRanksError
from te_models.layers import Linear, autocast, recipe
from te_models.layers.module.model_state import quantized_modules
from te_models.model.output import ModelOutput
from tests.te_models.configs import VARIANTS, one_layer, tiny_moe, token_ids

STEPS = ((9, 9), (9, 14), (9, 14), (3, 30), (17, 2), (9, 9))
"""Tokens per sequence in each step, on even and odd ranks: alike at first, then not, then different again."""
LONG_STEPS = ((19, 19), (19, 24), (19, 24), (17, 40), (27, 18), (19, 19))
"""The same with more than 32 tokens in each batch of two: more than a single block of MXFP8."""


class Graphs:
    """A backend that notes which graphs it compiled. Names of values and their count, not memory addresses.

    slow: rank 1 takes seconds longer for each graph than the others.
    """

    def __init__(self, slow: bool = False) -> None:
        self.seen: list[str] = []
        self.slow = slow

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        if self.slow and dist.get_rank() == 1:
            time.sleep(3)
        text = "\n".join(
            f"{node.op} {getattr(node.target, '__name__', node.target)} {len(node.args)}" for node in graph.graph.nodes
        )
        self.seen.append(hashlib.sha256(text.encode()).hexdigest())
        return lookup_backend(BACKEND)(graph, inputs)


BACKEND = "aot_eager"
TIMEOUT_S = 600.0
"""For ranks that come."""
SHORT_PATIENCE_S = 2.0
PATIENCE_S = 10.0
"""For one that does not come, and at first for one that does: at least as long as the longest training case."""


class Words(torch.nn.Module):
    """A model of two layers, called as a GPTModel is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output_layer = torch.nn.Embedding(61, 16), Linear(16, 61)

    def forward(self, ids: Tensor, labels: Tensor, return_logits: bool) -> ModelOutput:
        loss = torch.nn.functional.cross_entropy(self.output_layer(self.embedding(ids)).flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss)


def build(kind: str) -> GPTModel | Words:
    """Equal on every rank."""
    torch.manual_seed(0)
    if kind == "words":
        return Words()
    if kind == "dense":
        return GPTModel(one_layer(VARIANTS["dense"]))
    config = tiny_moe(RouterConfig(score="sigmoid", expert_bias=True))
    model = GPTModel(config if kind == "deep_moe" else one_layer(config))
    if dist.get_rank() == 0:  # here no token ever goes to the first expert, nor to the last
        for layer in model.decoder.layers:
            layer.mlp.router.expert_bias.copy_(torch.tensor([-9.0, 9.0, 9.0, -9.0]))
    return model


def train(kind: str, mode: str, name: str | None = None, *, late: bool = False, slow: bool = False) -> dict[str, Any]:
    """Train on shapes that differ between the ranks. name: the recipe; late: rank 1 calls seconds after the others;
    slow: it compiles seconds longer."""
    rank, graphs = dist.get_rank(), Graphs(slow)
    model = compile_model(build(kind), mode, backend=graphs, timeout_s=TIMEOUT_S)
    for step, lengths in enumerate(LONG_STEPS if name == "mxfp8" else STEPS):
        if late and rank == 1:
            time.sleep(3 if step < 2 else 0)
        ids = token_ids(2, lengths[rank % 2], seed=10 * step + rank)
        model.zero_grad()
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.05 * parameter.grad / dist.get_world_size()
    state = [*model.parameters(), *(layer.fp8_scale for _, layer in quantized_modules(model))]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()
    moved = all(bool((layer.fp8_scale != 1).any()) for _, layer in quantized_modules(model))
    return {"graphs": graphs.seen, "parameters": digest, "every layer's scales moved": moved}


def desert(kind: str, mode: str = "whole") -> dict[str, Any]:
    """Rank 1 calls the model once less than the others, and waits at the end."""
    model = compile_model(build(kind), mode, backend=Graphs(), timeout_s=PATIENCE_S)
    ids = token_ids(2, 9)
    model(ids)
    return {"error": None if dist.get_rank() == 1 else _error_of(lambda: model(ids))}


def absent(kind: str, mode: str = "whole") -> dict[str, Any]:
    """Rank 1 never calls the model, so that the others wait for it while they compile."""
    model = compile_model(build(kind), mode, backend=Graphs(), timeout_s=PATIENCE_S)
    return {"error": None if dist.get_rank() == 1 else _error_of(lambda: model(token_ids(2, 9)))}


def desert_layer() -> dict[str, Any]:
    """The same with a module that compiles at once, so that the others need not wait for long."""
    model = compile_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), backend=Graphs(), timeout_s=SHORT_PATIENCE_S)
    x = torch.ones(2, 4)
    model(x)
    return {"error": None if dist.get_rank() == 1 else _error_of(lambda: model(x))}


def uncompiled() -> dict[str, Any]:
    """Rank 1 does not compile its model."""
    if dist.get_rank() == 1:
        return {"error": None}
    return {"error": _error_of(lambda: compile_model(build("dense"), backend=Graphs(), timeout_s=PATIENCE_S))}


def stages() -> dict[str, Any]:
    """Two groups, as of two pipeline stages: the ranks of one compile another model, and call it more often. Every rank
    names a group that it is not in, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([r for r in range(ranks) if r % 2 == stage]) for stage in (0, 1)]
    stage, graphs = rank % 2, Graphs()
    model = build("dense" if stage else "moe")
    options = {"backend": graphs, "timeout_s": PATIENCE_S}
    try:
        compile_model(model, process_group=groups[1 - stage], **options)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    compile_model(model, process_group=groups[stage], **options)
    for step in range(2 + 2 * stage):  # from the second call on, lengths differ between the ranks of a stage
        loss = model(ids := token_ids(2, 9 + (5 + rank) * min(step, 1), seed=rank), labels=ids).loss
        loss.backward()
    return {"graphs": graphs.seen, "refusal": refusal}


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MissingRanksError as error:
        return str(error)
    return "no error"


CASES = {
    "words": lambda: train("words", "whole"),
    "dense": lambda: train("dense", "whole"),
    "moe": lambda: train("moe", "whole"),
    "block": lambda: train("deep_moe", "block"),
    "late": lambda: train("dense", "whole", late=True),
    "slow": lambda: train("dense", "whole", slow=True),
    "mxfp8": lambda: train("moe", "whole", "mxfp8"),
    "delayed": lambda: train("dense", "whole", "delayed"),
    "block_delayed": lambda: train("deep_moe", "block", "delayed"),
    "desert": lambda: desert("dense"),
    "desert_layer": desert_layer,
    "absent": lambda: absent("dense"),
    "uncompiled": uncompiled,
    "stages": stages,
    "block_desert": lambda: desert("deep_moe", "block"),
    "block_absent": lambda: absent("deep_moe", "block"),
}


def main(results: str, cases: str, backend: str) -> None:
    """Run the cases, separated by commas, on this rank."""
    global BACKEND, PATIENCE_S
    BACKEND = backend
    dist.init_process_group("gloo", timeout=timedelta(seconds=1200))
    outcomes = {}
    for case in cases.split(","):
        torch._dynamo.reset()
        dist.barrier()  # who waited in vain comes late to the next case
        begun = time.monotonic()
        outcomes[case] = CASES[case]()
        if "error" not in outcomes[case]:
            longest = torch.tensor(time.monotonic() - begun)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            PATIENCE_S = max(PATIENCE_S, longest.item())
    Path(f"{results}.{dist.get_rank()}").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
