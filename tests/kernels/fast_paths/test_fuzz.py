"""Calls that fit, and calls that do not, give what the definition gives: see `fuzz`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_models.kernels.cpp_library import CompilationError
from te_models.kernels.cpu_rows import rows
from tests.kernels.fast_paths.cases import CASES
from tests.kernels.fast_paths.fuzz import fuzz

EVERYDAY, ALL = 1_000, 24_000
_WARNS = torch._C._functorch._set_vmap_fallback_warning_enabled  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    try:
        rows._function("te_rotate", torch.bfloat16)
    except CompilationError as error:
        pytest.skip(f"the definitions alone run here: {error}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _WARNS(False)
    yield
    _WARNS(True)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # of what torch says about some of the layouts
@pytest.mark.parametrize(
    ("calls", "seed"), [(EVERYDAY, 0), pytest.param(ALL, 1, marks=pytest.mark.slow)], ids=["everyday", "all"]
)
def test_a_fast_path_answers_as_the_definition(calls: int, seed: int) -> None:
    report = fuzz(calls, seed)
    assert not report.failures, "\n".join([f"{len(report.failures)} of {calls} calls", *report.failures[:20]])
    for case in CASES:
        found = {
            kind: sum(n for (name, _, k), n in report.kinds.items() if (name, k) == (case.name, kind))
            for kind in ("value", "error")
        }
        assert 4 * found["value"] > found["error"], f"calls of {case.name} are to fit: {found}"
