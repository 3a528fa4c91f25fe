"""A machine's compiler is asked once which vector instructions it knows, and later processes need not ask it."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from te_models.compile import cache
from te_models.compile.vector_isa import compiler_knows_all

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="asked in this way on Linux on x86 alone"
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine that nobody has used: what the compiler is asked for, which it knows."""
    found: list[str] = []

    def build(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        found.append(str(isa))
        return True

    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", build)
    another_process()
    with config.patch({"cpp.vec_isa_ok": None}):
        yield found
    monkeypatch.undo()
    another_process()


def another_process() -> None:
    compiler_knows_all.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()


def test_a_later_process_does_not_ask(asked: list[str], tmp_path: Path) -> None:
    assert compiler_knows_all() and asked
    asked.clear()
    another_process()
    assert compiler_knows_all() and not asked
    (known,) = (tmp_path / "vector_isa").iterdir()
    known.unlink()
    another_process()
    assert compiler_knows_all() and asked, "the file is what tells"


def test_another_compiler_is_asked_again(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_knows_all()
    other = tmp_path / "g++"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o700)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: str(other))
    asked.clear()
    another_process()
    assert compiler_knows_all() and asked


def test_a_compiler_that_lacks_some_is_asked_each_time(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: bool(asked.append(str(isa))))
    assert not compiler_knows_all() and not (tmp_path / "vector_isa").exists()
    another_process()
    asked.clear()
    assert not compiler_knows_all() and asked


def test_what_the_user_says_holds(asked: list[str]) -> None:
    with config.patch({"cpp.vec_isa_ok": False}):
        assert not compiler_knows_all() and not asked


def test_no_compiler_and_a_folder_that_cannot_be_written(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert compiler_knows_all(), "it was asked, and cannot be remembered"
    another_process()
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: os.devnull + "/none")
    assert not compiler_knows_all()


@pytest.mark.parametrize("known", [True, False])
def test_inductor_is_told(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(cache, "compiler_knows_all", lambda: known)
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, inputs: told.append(config.cpp.vec_isa_ok)
    )
    cache.inductor(torch.fx.symbolic_trace(torch.nn.Identity()), [])
    assert told == [True if known else config.cpp.vec_isa_ok]
