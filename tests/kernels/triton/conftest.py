"""How Triton kernels are tested: natively where there is a GPU, under Triton's interpreter (numpy) elsewhere.

A test takes the `device` fixture, makes its tensors there and calls the launcher in `kernels/<op>/triton*.py` or the
registered op that wraps it; the same test then checks the interpreter on CPU and the compiled kernel on a GPU. Real
sizes carry the `gpu` mark: the interpreter needs about a millisecond per program and device function, so without it
keep to a few programs. Kernel modules import triton at their top, so test modules import them inside a test or a
fixture, or call an op that does so lazily: collection must work where triton has no build.

`poisoned` fills every `torch.empty` with NaN (255 in bytes), so that an element that a kernel leaves unwritten shows.

`device` corrects the interpreter's rounding of narrow casts (interpreter.py). What it does differently from a GPU, and
kernels must not rely on: tl.max and tl.min skip NaN; `//` and `/` on tensors follow numpy; float32 sums are in numpy's
order."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Numpy, under the interpreter, warns of infinities and NaN that tests feed on purpose."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU, or the CPU with Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton has no build for this platform")
    import triton

    if torch.cuda.is_available():
        return torch.device("cuda")
    assert type(triton.language.max).__name__ == "InterpretedFunction", (
        "triton was imported before tests/conftest.py set TRITON_INTERPRET"
    )
    from tests.kernels.triton import interpreter

    interpreter.correct(monkeypatch)
    return torch.device("cpu")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN and 255."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
