"""FP8 moments that the ranks of one layout saved are those that every other layout goes on with: the same layout bit
for bit, others to the rounding of FP8. On four gloo ranks; the cases are in fp8_moments_ranks."""

from __future__ import annotations

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch is built without distributed or gloo", allow_module_level=True)

from te_models.training.checkpoints.checks import TrainingCheckpointError
from te_models.training.checkpoints.fp8_moments import _cuts_of
from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.training.checkpoints.fp8_moments_ranks import CASES, RANKS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on each rank."""
    results = tmp_path_factory.mktemp("moments") / "results"
    module = "tests.training.checkpoints.fp8_moments_ranks"
    return outcomes_on_ranks(module, results, ranks=RANKS, only=selected(request, "case"), timeout=300)


@pytest.mark.slow
@pytest.mark.costs(40)
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok"] * RANKS


def test_names_say_which_part_it_is() -> None:
    shape = (64, 80)
    assert _cuts_of("", shape) == {}
    assert _cuts_of("0=0-64&1=0-16,64-80", shape) == {0: ((0, 64),), 1: ((0, 16), (64, 80))}
    wrong = ("0", "0=1", "a=0-1", "0=0-1-2", "2=0-1", "-1=0-1", "0=0-65", "0=8-8", "0=9-8", "1=0-16,8-24", "0=0-1\0")
    for text in (*wrong, f"0=0-{10**40}"):
        with pytest.raises(TrainingCheckpointError, match="does not say a part of a parameter, such as '0=0-64'"):
            _cuts_of(text, shape)
