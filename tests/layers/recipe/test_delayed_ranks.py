"""Delayed scaling on two real processes: the amaxes of all GEMMs are reduced over the group, eagerly and compiled,
also where the compiled run goes on from a checkpoint. The ranks train weights of their own, so no amax is equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


def found_by(folder: Path, *cases: str) -> list[dict[str, Tensor]]:
    """What each rank found in these cases."""
    results = folder / "results"
    run_on_ranks(["-m", "tests.layers.delayed_ranks", str(results), *cases], timeout=600)
    return [load_file(results.with_suffix(f".{rank}")) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What each rank found eagerly."""
    return found_by(tmp_path_factory.mktemp("delayed"), "eager", "own group", "no reduction")


@pytest.mark.slow
def test_compiled_steps_with_a_resume_equal_eager_ones_on_each_rank(tmp_path: Path) -> None:
    for found in found_by(tmp_path, "eager", "compiled"):
        for key in ("outputs", "scales", "histories"):
            torch.testing.assert_close(found[f"compiled/{key}"], found[f"eager/{key}"], rtol=0, atol=0)


def test_the_ranks_agree_on_the_larger_amax(ranks: list[dict[str, Tensor]]) -> None:
    first, second = ranks
    for key in ("scales", "histories"):
        assert torch.equal(first[f"eager/{key}"], second[f"eager/{key}"])
    largest = torch.maximum(first["eager/amaxes"], second["eager/amaxes"])
    for found in ranks:  # of every role and GEMM, each rank has had the larger one in some step; an expert gets no rows
        mine = (found["eager/amaxes"] == largest) & (first["eager/amaxes"] != second["eager/amaxes"])
        assert mine[..., [0, 1, 3]].any(0).all()
    assert (first["eager/amaxes"] != second["eager/amaxes"])[:, 1, 2].all(), "but its weights are different ones, too"
    # [step, role, GEMM]
    newest = first["eager/histories"][:, 0]
    assert torch.equal(newest[:, :2], largest[:, :2])
    # the gradient of a step is seen by the next one's update
    assert torch.equal(newest[1:, 2], largest[:-1, 2])


@pytest.mark.parametrize("case", ["own group", "no reduction"])
def test_ranks_outside_the_group_do_not_count(case: str, ranks: list[dict[str, Tensor]]) -> None:
    for found in ranks:
        newest = found[f"{case}/histories"][:, 0]
        assert torch.equal(newest[:, :2], found[f"{case}/amaxes"][:, :2])
    for role in range(3):
        assert not torch.equal(ranks[0][f"{case}/scales"][:, role], ranks[1][f"{case}/scales"][:, role])
