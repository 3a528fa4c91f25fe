"""Where the GPU tests run, how Triton kernels run without a GPU, and which inputs property tests see.

TRITON_INTERPRET is read when triton itself is imported and when a kernel is decorated, so it has to be set before any
test module is collected. It changes nothing else: without a GPU nothing but our kernels is written in Triton."""

import atexit
import contextlib
import gc
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.covering import (
    BUDGET_FACTOR,
    CPU_TIMES,
    EVERYDAY,
    FILES,
    dearest_files,
    finish,
    mark_uncovered,
    seconds_of_files,
    start,
)
from tests.default_device import package_default
from tests.rewriting import rewrite_share
from tests.transformers_versions import skip_with_older_transformers

# The same inputs in every run, so that a change is what breaks a test; the slow ones search for new inputs.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    # `torch.manual_seed` would note the stack of each call, for devices that are not there
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


def pytest_configure(config: pytest.Config) -> None:
    import tests.compiler_costs  # noqa: F401  changes the compiler, with which triton is imported

    rewrite_share(config)
    logging.getLogger().addHandler(logging.NullHandler())  # without any, Python prints what libraries log
    EVERYDAY[0] = config.option.markexpr.startswith("not slow")
    BUDGET_FACTOR[0] = config.option.budget
    # Only a power failure tells what was flushed from what was not, and waiting for the disk took a tenth of the
    # training tests. That it is called, and when, is tests/checkpoints/io/test_flush_order.py.
    os.fsync = lambda descriptor: None


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the option asks for it, a default device that the package has to do without."""
    device = request.config.option.default_device
    with package_default(device) if device else contextlib.nullcontext():
        yield


@pytest.fixture(params=["definition", "compiled"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs twice: by the definitions alone, and with the C++ libraries."""
    from te_models.kernels.backend import using_backend

    with using_backend(request.param):
        yield request.param


@pytest.fixture
def definitions() -> Iterator[None]:
    """The definitions compute, for tests that look on what they call."""
    from te_models.kernels.backend import using_backend

    with using_backend("definition"):
        yield


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The answer to whether there is a library is not that of other tests, nor theirs this one's."""
    from te_models.kernels.backend import fallbacks, forget

    forget()
    fallbacks.clear()
    yield
    forget()
    fallbacks.clear()


@pytest.fixture(scope="session")
def _transformers_process() -> Iterator[list[Any]]:
    """The process that reads tokenizers with transformers, once one was started."""
    started: list[Any] = []
    yield started
    for process in started:
        process._end()


@pytest.fixture
def shared_tokenizer_process(_transformers_process: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers that transformers reads share one process of the session, which takes seconds to import it; every
    request names its folder. For tests of what comes out, not of how the process ends."""
    from te_models import tokenizer

    start = tokenizer._Process

    class Shared(start):
        def close(self) -> None:
            """The next test goes on with it."""

    def shared(where: str, memory_bytes: int, *arguments: int) -> Any:
        if memory_bytes != tokenizer._TRANSFORMERS_MEMORY_BYTES:
            return start(where, memory_bytes, *arguments)
        if not _transformers_process:
            _transformers_process.append(Shared(where, memory_bytes, *arguments))
        _transformers_process[0]._where = where
        return _transformers_process[0]

    monkeypatch.setattr(tokenizer, "_Process", shared)


class _WithoutRanks(pytest.Module):
    """A file whose tests run on ranks, for a torch without them, which cannot import what the file imports."""

    def collect(self) -> list[Any]:
        pytest.skip("this torch is built without distributed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if torch.distributed.is_available() or "on_ranks" not in module_path.read_text(encoding="utf-8"):
        return None
    return _WithoutRanks.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_uncovered(items)
    skip_with_older_transformers(items)
    for item in items:
        if not item.get_closest_marker("gpu"):
            continue
        # no accelerator has a GEMM for every format; that one is missing is for other tests to find
        item.add_marker(pytest.mark.filterwarnings("ignore:.* runs as emulation:RuntimeWarning"))
        if not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and this machine has none"))


gc.disable()  # importing and collecting make next to no garbage, and millions of objects to walk


def pytest_collection_finish() -> None:
    """Keep what importing and collecting made out of the garbage collector, which would walk it during the tests, and
    let it walk the graphs that the compiler holds less often: at Python's thresholds that is a fifteenth of the time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    atexit.register(gc.unfreeze)  # extensions look for leaks at exit, and pytest for garbage before


def pytest_sessionfinish(session: pytest.Session) -> None:
    seconds = seconds_of_files(session.config.stash.get(CPU_TIMES, {}))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = dict(seconds)  # execnet sends no subclasses
    session.config.stash.setdefault(FILES, Counter()).update(seconds)
    file = session.config.getoption("--cpu-times")
    if file and CPU_TIMES in session.config.stash:
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        file = f"{file}.{worker}" if worker else file
        Path(file).write_text(json.dumps(session.config.stash[CPU_TIMES], indent=1))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(FILES, Counter()).update(getattr(node, "workeroutput", {}).get("seconds", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In `make test-budget`, say where the time went."""
    if math.isfinite(BUDGET_FACTOR[0]):
        for line in dearest_files(terminalreporter.config.stash.get(FILES, Counter())):
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        help="write the processor seconds of each test, fixtures and child processes included, to FILE as JSON; "
        "with -n, to FILE.gw0, FILE.gw1, ...",
    )
    parser.addoption(
        "--budget",
        metavar="FACTOR",
        type=float,
        default=math.inf,
        help="fail everyday tests that take more than FACTOR times their budget of processor time: what "
        "`python -m tests.machine_speed` prints",
    )
    parser.addoption(
        "--default-device",
        metavar="DEVICE",
        help="torch's default device for what the package itself makes, such as meta, which has no memory",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Every test finds a compiler that has compiled nothing and counts from zero."""
    from torch._dynamo.utils import counters

    start(item, "setup")
    if counters:
        torch._dynamo.reset()
        counters.clear()
    result = yield
    start(item, "call")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """A test's body draws the same random numbers whatever ran before it and whatever its fixtures drew."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    start(item, "teardown")
    result = yield
    finish(item)
    return result
