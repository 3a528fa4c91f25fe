"""Collectives on two real processes, eagerly and compiled."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.covering import selected
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    """What each rank found."""
    results = tmp_path_factory.mktemp("collectives") / "results"
    run_on_ranks(["-m", "tests.layers.te.ops.collective_ranks", str(results), *selected(request, "mode")], timeout=200)
    return [load_file(results.with_suffix(f".{rank}")) for rank in range(2)]


def expected(name: str, rank: int, ranks: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """The output and the gradient of x of `3 collective(2 x)`."""
    x, dy = ([found[f"{name}/{key}"] for found in ranks] for key in ("x", "dy"))
    part = slice(2 * rank, 2 * rank + 2)
    if name == "gather":
        return 6 * torch.cat(x), 6 * (dy[0] + dy[1])[4 * rank : 4 * rank + 4]
    if name == "scatter":
        return 6 * (x[0] + x[1])[part], 6 * torch.cat(dy)
    return 6 * (x[0] + x[1]), 6 * dy[rank]


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gather", "scatter", "reduce"])
def test_values_and_gradients(name: str, mode: str, ranks: list[dict[str, Tensor]]) -> None:
    for rank, found in enumerate(ranks):
        y, dx = expected(name, rank, ranks)
        torch.testing.assert_close(found[f"{name}/{mode}/y"], y)
        torch.testing.assert_close(found[f"{name}/{mode}/dx"], dx)
