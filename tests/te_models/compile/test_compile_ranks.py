"""compile_model on several ranks that see different shapes: the same graphs, no hang, the same parameters."""

import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_models import GPTModel, RouterConfig, compile_model
from te_models.compile import ranks as compile_ranks
from te_models.compile.ranks import MissingRanksError
from te_models.layers import Linear, autocast, recipe
from te_models.layers.module.model_state import quantized_modules
from te_models.model.output import ModelOutput
from tests.build import VARIANTS, one_layer, tiny_moe, token_ids
from tests.ranks import run_on_ranks

STEPS = ((9, 9), (9, 14), (9, 14), (3, 30), (17, 2), (9, 9))
"""Tokens per sequence in each step, on even and odd ranks: alike at first, then not, then different again."""
LONG_STEPS = ((19, 19), (19, 24), (19, 24), (17, 40), (27, 18), (19, 19))
"""The same with more than 32 tokens in each batch of two: more than a single block of MXFP8."""


class Graphs:
    """A backend that notes which graphs it compiled. Names of values and their count, not memory addresses.

    slow: rank 1 takes seconds longer for each graph than the others."""

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
    grace = compile_ranks._GRACE_S if dist.get_world_size() > 2 else 0.1  # for others that give up, too
    with mock.patch.object(compile_ranks, "_GRACE_S", grace):
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
        model(ids := token_ids(2, 9 + (5 + rank) * min(step, 1), seed=rank), labels=ids).loss.backward()
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


TRAINED = ("words", "dense", "moe", "block", "late", "slow", "mxfp8", "delayed", "block_delayed")
MISSING = {
    **dict.fromkeys(("desert", "desert_layer", "absent"), "call a compiled model"),
    "uncompiled": "compile a model",
}
"""In vain, with the rank that is missing."""
MISSING_CASES = ("block_desert", "block_absent", *MISSING)
"""Last the one after which ranks have made different numbers of process groups, so that none comes about any more."""
LAUNCHES = {
    "two": (2, ("words", "desert_layer"), "eager"),
    "two_full": (2, (*TRAINED[1:], *MISSING_CASES), "aot_eager"),
    "four_full": (4, (*TRAINED[1:], "stages", *MISSING), "aot_eager"),
}
"""How many ranks run which cases, one after the other, and the backend; the full ones are slow. Graphs are counted and
ranks are awaited in front of the backend, so the one that compiles nothing does for every run."""


def cases(missing: bool) -> list[Any]:
    """The (launch, case) in which a rank is missing, or those in which none is."""
    return [
        pytest.param(name, case, marks=pytest.mark.slow if name.endswith("full") else (), id=f"{name}-{case}")
        for name, (_, cases, _) in LAUNCHES.items()
        for case in cases
        if case in (MISSING_CASES if missing else TRAINED)
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """A function that runs a launch, once, and returns what every case came to, by rank."""

    @functools.cache
    def run(launch: str) -> list[dict[str, Any]]:
        ranks, cases, backend = LAUNCHES[launch]
        results = tmp_path_factory.mktemp(launch) / "results"
        words = ["-m", "tests.te_models.compile.test_compile_ranks", str(results), ",".join(cases), backend]
        fresh = launch.endswith("full")  # ranks whose sets have other orders
        run_on_ranks(words, ranks=ranks, timeout=100 + 100 * ranks * len(cases), fresh=fresh)
        return [json.loads(results.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]

    return run


@pytest.mark.costs(60)
@pytest.mark.parametrize(("launch", "case"), cases(missing=False))
def test_ranks_with_diverging_token_counts(launch: str, case: str, outcomes: Callable) -> None:
    """Every rank compiles the same graphs and ends with the same parameters, and scales.

    In the mixtures one rank has no tokens for two experts. late: one rank calls seconds after the others; slow: it
    compiles seconds longer."""
    first, *others = (outcome[case] for outcome in outcomes(launch))
    # the first shape, then one for all; in block mode the same of the layer and of the output layer
    assert len(first["graphs"]) == (4 if "block" in case else 2)
    assert first["every layer's scales moved"] == ("delayed" in case)
    assert others == [first] * (LAUNCHES[launch][0] - 1)


@pytest.mark.parametrize(("launch", "case"), cases(missing=True))
def test_a_timeout_names_the_missing_rank(launch: str, case: str, outcomes: Callable) -> None:
    """desert: rank 1 calls once less than the others; absent: it never calls; uncompiled: it has not compiled."""
    for rank, outcome in enumerate(outcomes(launch)):
        if rank == 1:
            assert outcome[case]["error"] is None
        else:
            expected = f"rank {rank} waited in vain to {MISSING[case.removeprefix('block_')]} together with rank 1:"
            assert expected in outcome[case]["error"]


@pytest.mark.slow
def test_groups_compile_apart(outcomes: Callable) -> None:
    """Ranks of a process group compile together, and wait for no others, which call another model less often."""
    found = [outcome["stages"] for outcome in outcomes("four_full")]
    assert found[0]["graphs"] == found[2]["graphs"] and found[1]["graphs"] == found[3]["graphs"]
    assert len(found[0]["graphs"]) == len(found[1]["graphs"]) == 2 and found[0]["graphs"] != found[1]["graphs"]
    assert [f["refusal"] for f in found] == [
        f"process_group does not contain this rank, {rank}; allowed: a group that does" for rank in range(4)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
