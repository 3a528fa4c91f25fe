"""Digests of several parts at once are hashlib's, and hashlib's where there is no library."""

import hashlib
import random
from pathlib import Path

import pytest
import torch

from te_models.checkpoints.io import sha256
from te_models.checkpoints.io.sha256 import digests_of_each
from te_models.kernels import cpp_library
from te_models.kernels.backend import explain, fallbacks, has_library, using_backend

SIZES = (1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, 4096, 5000)


def by_hashlib(data: bytes, size: int) -> bytes:
    return b"".join(hashlib.sha256(data[at : at + size]).digest() for at in range(0, len(data), size))


def random_bytes(count: int) -> memoryview:
    return memoryview(bytearray(random.Random(count).randbytes(count)))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any size go to the library; skips where the processor has no instructions for SHA-256."""
    monkeypatch.setattr(sha256, "LEAST", 0)
    if not has_library(sha256.SHA256):
        pytest.skip(explain(sha256.SHA256, torch.empty(1)))


@pytest.mark.parametrize("size", SIZES)
def test_digests_are_those_of_hashlib(size: int, library: None) -> None:
    for count in range(1, 14):
        data = random_bytes(count * size)
        assert digests_of_each(data, size) == by_hashlib(data, size)
        shifted = random_bytes(count * size + 1)[1:]
        assert digests_of_each(shifted, size) == by_hashlib(shifted, size)
    assert digests_of_each(memoryview(b""), size) == b""


def test_only_bytes_that_can_be_written_have_an_address(library: None) -> None:
    data = bytes(random_bytes(300))
    assert digests_of_each(memoryview(data), 100) == by_hashlib(data, 100)


def test_few_bytes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sha256, "_function", lambda: pytest.fail("compiled"))
    data = random_bytes(300)
    assert digests_of_each(data, 100) == by_hashlib(data, 100)
    monkeypatch.setattr(sha256, "LEAST", 0)
    with using_backend("definition"):
        assert digests_of_each(data, 100) == by_hashlib(data, 100)


def test_hashlib_stays_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    def fails() -> None:
        raise cpp_library.CompilationError("#error the processor has no instructions for SHA-256")

    monkeypatch.setattr(sha256, "LEAST", 0)
    monkeypatch.setattr(sha256, "_function", fails)
    data = random_bytes(300)
    for _ in range(2):
        assert digests_of_each(data, 100) == by_hashlib(data, 100)
    with using_backend("compiled"):  # is no error for what is not for this processor
        assert digests_of_each(data, 100) == by_hashlib(data, 100)
    assert not fallbacks


def test_a_processor_without_the_instructions_says_so(tmp_path: Path) -> None:
    """The code does not compile for one, so that nothing else has to know processors."""
    without = tmp_path / "without.cpp"
    without.write_text('#undef __SHA__\n#include "sha256.cpp"\n')
    with pytest.raises(cpp_library.CompilationError, match="has no instructions for SHA-256"):
        cpp_library.function(without, {}, "te_sha256", sha256._ARGUMENTS)
