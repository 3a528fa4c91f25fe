"""Digests of several parts at once are hashlib's, and hashlib's where there is no library."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import pytest

from te_models.checkpoints.io import sha256
from te_models.checkpoints.io.sha256 import Library, digests_of_each
from te_models.kernels import cpp_library

SIZES = (1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, 4096, 5000)


def by_hashlib(data: bytes, size: int) -> bytes:
    return b"".join(hashlib.sha256(data[at : at + size]).digest() for at in range(0, len(data), size))


def random_bytes(count: int) -> memoryview:
    return memoryview(bytearray(random.Random(count).randbytes(count)))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A process that has hashed nothing, on a machine without the library."""
    library = Library()
    monkeypatch.setattr(sha256, "library", library)
    monkeypatch.setattr(sha256, "_is_cached", lambda: False)
    return library


@pytest.fixture(scope="module")
def function():
    """The compiled function; skips where the processor has no instructions for SHA-256."""
    try:
        return cpp_library.function("sha256.cpp", {}, "te_sha256", sha256._ARGUMENTS)
    except cpp_library.CompilationError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("size", SIZES)
def test_digests_are_those_of_hashlib(size: int, function, fresh: Library) -> None:
    fresh._function = function
    for count in range(1, 14):
        data = random_bytes(count * size)
        assert digests_of_each(data, size) == by_hashlib(data, size)
        shifted = random_bytes(count * size + 1)[1:]
        assert digests_of_each(shifted, size) == by_hashlib(shifted, size)
    assert digests_of_each(memoryview(b""), size) == b""


def test_only_bytes_that_can_be_written_have_an_address(function, fresh: Library) -> None:
    fresh._function = function
    data = bytes(random_bytes(300))
    assert digests_of_each(memoryview(data), 100) == by_hashlib(data, 100)


def test_the_library_is_compiled_after_much_work(fresh: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own: those that hash do not wait for it."""
    calls, go = [], threading.Event()

    def compiled(*arguments: object) -> str:
        calls.append(threading.current_thread().name)
        assert go.wait(10)
        return "function"

    monkeypatch.setattr(cpp_library, "function", compiled)
    monkeypatch.setattr(sha256, "LEAST", 1000)
    assert fresh.function(1000) is None and not calls
    assert fresh.function(1) is None and fresh.function(5000) is None
    go.set()
    for thread in threading.enumerate():
        if thread.name == "compile sha256":
            thread.join(10)
    assert calls == ["compile sha256"] and fresh.function(1) == "function"


def test_a_machine_that_has_the_library_uses_it_at_once(fresh: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sha256, "_is_cached", lambda: True)
    monkeypatch.setattr(cpp_library, "function", lambda *arguments: "function")
    assert fresh.function(1) == "function"


def test_hashlib_stays_where_there_is_no_library(fresh: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise cpp_library.CompilationError("the processor has no instructions for SHA-256")

    monkeypatch.setattr(sha256, "_is_cached", lambda: True)
    monkeypatch.setattr(cpp_library, "function", fails)
    data = random_bytes(300)
    for _ in range(2):
        assert digests_of_each(data, 100) == by_hashlib(data, 100)
    assert fresh._started and fresh._function is None


def test_a_processor_without_the_instructions_says_so(tmp_path: Path) -> None:
    """The code does not compile for one, so that nothing else has to know processors."""
    without = tmp_path / "without.cpp"
    without.write_text('#undef __SHA__\n#include "sha256.cpp"\n')
    with pytest.raises(cpp_library.CompilationError, match="has no instructions for SHA-256"):
        cpp_library.function(without, {}, "te_sha256", sha256._ARGUMENTS)
