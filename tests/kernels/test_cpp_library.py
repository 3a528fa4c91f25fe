"""C++ functions are compiled once for a machine, whole or not at all; what is in the way is one sentence."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_models.kernels import cpp_library

CODE = 'extern "C" void te_add(int* x) { *x += ADDED; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path / "cache"))
    cpp_library._loaded.cache_clear()
    cpp_library._command.cache_clear()
    yield tmp_path / "cache" / "cpp"
    cpp_library._loaded.cache_clear()
    cpp_library._command.cache_clear()


def _added(number: int) -> int:
    x = ctypes.c_int(1)
    cpp_library.function(CODE, {"ADDED": str(number)}, "te_add", (ctypes.c_void_p,))(ctypes.byref(x))
    return x.value


def test_a_source_is_compiled_once_for_each_macro(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cpp_library.is_cached(CODE, {"ADDED": "2"})
    assert (_added(2), _added(5)) == (3, 6)
    assert cpp_library.is_cached(CODE, {"ADDED": "2"})
    assert len(list(own_cache.iterdir())) == 2, "two libraries, nothing else"
    monkeypatch.setattr(cpp_library, "_compile", lambda *arguments: pytest.fail("compiled again"))
    cpp_library._loaded.cache_clear()  # as in another process
    assert (_added(2), _added(5)) == (3, 6)
    monkeypatch.setattr(cpp_library, "instruction_sets", lambda: "others")
    assert not cpp_library.is_cached(CODE, {"ADDED": "2"}), "code for another processor may not run on this one"


def test_a_damaged_library_is_compiled_again(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    cpp_library._file(cpp_library._source(CODE, {"ADDED": "7"})).write_bytes(b"\x7fELF, cut")
    assert _added(7) == 8


def test_a_folder_that_cannot_be_written_is_replaced_for_the_process(own_cache: Path) -> None:
    own_cache.parent.write_text("a file")
    assert _added(3) == 4
    assert own_cache.parent.read_text() == "a file"


def test_processes_that_compile_at_once(own_cache: Path) -> None:
    code = f"""
import ctypes
from te_models.kernels import cpp_library
x = ctypes.c_int(1)
cpp_library.function({CODE!r}, {{"ADDED": "4"}}, "te_add", (ctypes.c_void_p,))(ctypes.byref(x))
print(x.value)
"""
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in started] == ["5", "5"]
    assert len(list(own_cache.iterdir())) == 1


def test_what_is_in_the_way_is_one_sentence(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cpp_library.CompilationError, match=r"cannot compile a library: .*'nothing' was not declared"):
        cpp_library.function("int f() { return nothing; }", {}, "f", ())
    assert list(own_cache.iterdir()) == []
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    cpp_library._command.cache_clear()
    with pytest.raises(cpp_library.CompilationError, match=r"^there is no C\+\+ compiler$"):
        _added(1)
    assert not cpp_library.is_cached(CODE, {"ADDED": "1"})
