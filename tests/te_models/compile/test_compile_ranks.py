"""compile_model on several ranks that see different shapes: the same graphs, no hang, the same parameters."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

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
        words = ["-m", "tests.te_models.compile_ranks_cases", str(results), ",".join(cases), backend]
        fresh = launch.endswith("full")  # ranks whose sets have other orders
        run_on_ranks(words, ranks=ranks, timeout=100 + 100 * ranks * len(cases), fresh=fresh)
        return [json.loads(results.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]

    return run


@pytest.mark.costs(60)
@pytest.mark.parametrize(("launch", "case"), cases(missing=False))
def test_ranks_with_diverging_token_counts(launch: str, case: str, outcomes: Callable) -> None:
    """Every rank compiles the same graphs and ends with the same parameters, and scales.

    In the mixtures one rank has no tokens for two experts. late: one rank calls seconds after the others; slow: it
    compiles seconds longer.
    """
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
