"""FSDP2 over quantized primary weights, on two real processes: see `fsdp_ranks` for what each case does."""

from __future__ import annotations

import pytest
import torch

from tests.covering import chosen, selected
from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.layers.fsdp_ranks import cases

    CASES = list(cases())
else:
    CASES = []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("fsdp") / "results"
    return outcomes_on_ranks("tests.layers.fsdp_ranks", results, only=selected(request, "case"), timeout=300)


def everyday(names: list[str]) -> list[str]:
    """Return the cases that cover every function, and every format that one takes."""
    split = [name.split("-") for name in names]
    cells = [{"function": function, "format": (rest or [""])[0], "grouped": rest[-1:]} for function, *rest in split]
    return [names[i] for i in chosen([{name: str(value) for name, value in cell.items()} for cell in cells], 1)]


@pytest.mark.sentinels(*everyday(CASES))
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]
