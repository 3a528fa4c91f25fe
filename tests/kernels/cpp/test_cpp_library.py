"""C++ functions are compiled once for a machine, whole or not at all; what is in the way is one sentence."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_models.kernels import cpp_cache, cpp_library
from te_models.kernels.machine import cache_folder, instruction_sets

CODE = Path(__file__).with_name("add.cpp")
ADD = f"""
import ctypes, os, sys, threading, time
from pathlib import Path
from te_models.kernels import cpp_library
def added(number):
    x = ctypes.c_int(1)
    cpp_library.function({str(CODE)!r}, {{"ADDED": str(number)}}, "te_add", (ctypes.c_void_p,))(ctypes.byref(x))
    return x.value
def wait_for(file):
    until = time.monotonic() + 120
    while not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.01)
"""


def forget() -> None:
    """As in another process."""
    for cached in (cpp_library._loaded, cpp_library._command, cpp_cache.private_folder):
        cached.cache_clear()
    cpp_library._said.clear()
    cpp_library._hung.clear()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "cpp"
    forget()


def added(number: int) -> int:
    x = ctypes.c_int(1)
    cpp_library.function(CODE, {"ADDED": str(number)}, "te_add", (ctypes.c_void_p,))(ctypes.byref(x))
    return x.value


def library_of(number: int, folder: Path) -> Path:
    return folder / cpp_library._name(cpp_library._source(CODE, {"ADDED": str(number)}))


def is_cached(defined: dict[str, str]) -> bool:
    """Whether the library of `CODE` with these macros is there already, in a folder that is trusted."""
    try:
        folder = cpp_cache.trusted(cache_folder() / "cpp")
        return cpp_cache.intact(folder / cpp_library._name(cpp_library._source(CODE, defined)))
    except (OSError, ValueError, cpp_library.CompilationError):
        return False


def libraries(folder: Path) -> int:
    """Count the libraries of a folder, which holds their digests and the lock besides, and nothing else."""
    names = sorted(file.name for file in folder.iterdir())
    found = [name for name in names if name.endswith(".so")]
    assert sorted([*found, *(name.replace(".so", ".sha256") for name in found), "lock"]) == names
    return len(found)


def compiler(tmp_path: Path, script: str) -> str:
    """Return the path of a compiler that is a shell script; $C++ in it is the machine's."""
    file = tmp_path / "compiler"
    file.write_text("#!/bin/sh\n" + script.replace("$C++", cpp_library._command()[0]))
    file.chmod(0o700)
    return str(file)


def test_a_source_is_compiled_once_for_each_macro(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_cached({"ADDED": "2"}) and (added(2), added(5)) == (3, 6)
    assert is_cached({"ADDED": "2"}) and libraries(own_cache) == 2
    monkeypatch.setattr(cpp_library, "_compile", lambda *arguments: pytest.fail("compiled again"))
    forget()
    assert (added(2), added(5)) == (3, 6)
    monkeypatch.setattr(cpp_library, "instruction_sets", lambda: "others")
    assert not is_cached({"ADDED": "2"}), "code for another processor may not run on this one"


def test_a_folder_that_cannot_be_written_is_replaced_for_the_process(own_cache: Path) -> None:
    own_cache.parent.write_text("a file")
    with pytest.warns(RuntimeWarning, match="are kept for this process alone: .*Not a directory") as said:
        assert (added(3), added(4)) == (4, 5)
    assert len(said) == 1, "said once"
    assert own_cache.parent.read_text() == "a file"


def test_what_is_in_the_way_is_one_sentence(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = r"cannot compile a library: \S*/wrong.h:2: 'nothing' was not declared"
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text('#include "wrong.h"\n')
    wrong.with_name("wrong.h").write_text("// of a header, whose line is said\nint f() { return nothing; }\n")
    with pytest.raises(cpp_library.CompilationError, match=reason), pytest.warns(RuntimeWarning, match=reason):
        cpp_library.function(wrong, {}, "f", ())
    monkeypatch.setattr(cpp_library, "_compile", lambda *arguments: pytest.fail("tried again"))
    with pytest.raises(cpp_library.CompilationError, match=reason):
        cpp_library.function(wrong, {}, "f", ())
    assert libraries(own_cache) == 0
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    cpp_library._command.cache_clear()
    reason = r"^there is no C\+\+ compiler$"
    with pytest.raises(cpp_library.CompilationError, match=reason), pytest.warns(RuntimeWarning, match=reason[1:]):
        added(1)
    assert not is_cached({"ADDED": "1"})


def test_a_library_without_the_function_is_one_sentence() -> None:
    with pytest.raises(cpp_library.CompilationError, match="has no function te_other"):
        cpp_library.function(CODE, {"ADDED": "1"}, "te_other", ())


def test_another_text_of_an_included_file_is_another_library(own_cache: Path, tmp_path: Path) -> None:
    """... also of one that an included file includes; the same file elsewhere is the same library."""

    def found(folder: Path) -> int:
        forget()
        x = ctypes.c_int(1)
        cpp_library.function(folder / "a.cpp", {}, "te_add", (ctypes.c_void_p,))(ctypes.byref(x))
        return x.value

    texts = {
        "a.cpp": '#include "b.h"\n#include "numbers.h"\nextern "C" void te_add(int* x) { *x += kAdded; }\n',
        "b.h": '#pragma once\n#  include "c.h"\n',
        "c.h": '#pragma once\n#include "b.h"\nconstexpr int kAdded = 1;\n#define INPUT Float32\n',
    }
    for folder in (tmp_path / "here", tmp_path / "there"):
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
        assert found(folder) == 2 and libraries(own_cache) == 1
    (folder / "c.h").write_text(texts["c.h"].replace("= 1", "= 2"))
    assert found(folder) == 3 and libraries(own_cache) == 2
    (folder / "c.h").unlink()
    with pytest.raises(cpp_library.CompilationError, match=r"c\.h: No such file"), pytest.warns(RuntimeWarning):
        found(folder)


def test_eight_processes_at_first_use_compile_once(own_cache: Path, tmp_path: Path) -> None:
    environment = os.environ | {"CXX": compiler(tmp_path, f'echo >> {tmp_path}/calls; sleep 0.3; exec $C++ "$@"')}
    command = [sys.executable, "-c", ADD + "print(added(4))"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(8)]
    assert [process.communicate()[0].strip() for process in started] == ["5"] * 8
    assert (tmp_path / "calls").read_text() == "\n" and libraries(own_cache) == 1


KILLED = (
    ADD
    + """
threading.Thread(target=added, args=(4,)).start()
wait_for("begun")
pid = os.fork()  # outlives the process, and has its open files
if not pid:
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
"""
)


def test_a_killed_process_does_not_hold_others_up(own_cache: Path, tmp_path: Path) -> None:
    """... nor do its compiler and its forks; what it left is removed."""
    begun = tmp_path / "begun"
    script = f'if [ ! -e {begun} ]; then echo $$ > {begun}.; mv {begun}. {begun}; sleep 60; fi; exec $C++ "$@"'
    environment = os.environ | {"CXX": compiler(tmp_path, script)}
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": tmp_path}
    first = subprocess.Popen([sys.executable, "-c", KILLED], **options)
    fork = int(first.stdout.readline())
    first.kill()
    first.wait()
    try:
        assert list(own_cache.glob("*.partial"))
        second = subprocess.run([sys.executable, "-c", ADD + "print(added(4))"], **options, timeout=60, check=True)
        assert second.stdout == "5\n" and libraries(own_cache) == 1
    finally:
        first.stdout.close()
        os.killpg(int(begun.read_text()), signal.SIGKILL)
        os.kill(fork, signal.SIGKILL)


FORKED = (
    ADD
    + """
os.environ["TE_MODELS_CACHE"] = "relative" if sys.argv[1:] else os.environ["TE_MODELS_CACHE"]
thread = threading.Thread(target=added, args=(4,))
thread.start()
wait_for("begun")
pid = os.fork()
if not pid:
    sys.exit(0 if (added(4), added(6)) == (5, 7) else 1)
Path("forked").touch()
until = time.monotonic() + 60
while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
    time.sleep(0.01)
if ended == (0, 0):
    os.kill(pid, 9)
    ended = os.waitpid(pid, 0)
thread.join()
print(ended[1], added(4), added(8))
"""
)


@pytest.mark.parametrize("alone", [[], ["in folders of their own"]])
def test_a_fork_while_a_thread_compiles(tmp_path: Path, alone: list[str]) -> None:
    """The fork does not wait for a thread that it does not have, nor remove with its end what the process has."""
    script = f'echo > {tmp_path}/begun; while [ ! -e {tmp_path}/forked ]; do sleep 0.05; done; exec $C++ "$@"'
    environment = os.environ | {"CXX": compiler(tmp_path, script)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, *alone]
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": tmp_path}
    assert subprocess.run(command, **options, timeout=120, check=True).stdout == "0 5 9\n"


FORKED_AT_THE_START = (
    ADD
    + """
import subprocess
begin = subprocess._fork_exec
def slowly(*arguments):
    pid = begin(*arguments)
    Path("begun").touch()
    time.sleep(0.3)
    return pid
subprocess._fork_exec = slowly
thread = threading.Thread(target=added, args=(4,))
thread.start()
wait_for("begun")
pid = os.fork()
if not pid:
    time.sleep(100)
    os._exit(0)
thread.join(60)
print(thread.is_alive())
os.kill(pid, 9)
os.waitpid(pid, 0)
"""
)


def test_a_fork_while_a_compiler_starts(tmp_path: Path) -> None:
    """The fork has no pipe on whose end the thread that starts the compiler waits."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED_AT_THE_START]
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    assert subprocess.run(command, **options, timeout=170, check=True).stdout == "False\n"


def test_a_compiler_that_hangs_is_killed_with_its_children_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo >> {tmp_path}/calls; sleep 60 & echo $! > {tmp_path}/child; wait"
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    monkeypatch.setattr(cpp_library, "_SECONDS", 0.5)
    cpp_library._command.cache_clear()
    reason = r"was killed: it was not done after 0\.5 seconds"
    with pytest.raises(cpp_library.CompilationError, match=reason), pytest.warns(RuntimeWarning, match=reason):
        added(1)
    with pytest.raises(cpp_library.CompilationError, match=reason):
        added(2)
    assert (tmp_path / "calls").read_text() == "\n"
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    until = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_compiler_is_not_looked_for_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry of PATH means that one, and so does an empty entry of CPATH to the compiler itself."""
    found = cpp_library._command()[0]
    monkeypatch.chdir(tmp_path)
    for name in ("g++", "clang++", "c++", "cstdint"):
        (tmp_path / name).write_text(f"#!/bin/sh\n#error {name}\necho > {tmp_path}/ran\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f":.:{os.environ['PATH']}")
    monkeypatch.setenv("CPATH", "")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", ":.")
    cpp_library._command.cache_clear()
    assert cpp_library._command()[0] == found
    file = tmp_path / "source" / "included.cpp"
    file.parent.mkdir()
    file.write_text(f'#include <cstdint>\n#include "{CODE}"\n')
    assert cpp_library.function(file, {"ADDED": "1"}, "te_add", (ctypes.c_void_p,))
    assert not (tmp_path / "ran").exists()


def test_a_library_reads_no_declarations_of_other_processors() -> None:
    """All of <immintrin.h> takes GCC longer than most libraries."""
    compiler = cpp_library._command()
    said = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in said:
        pytest.skip(f"{compiler[0]} is not GCC")
    command = (*compiler, "-DINPUT=BFloat16", "-M", str(cpp_library.FOLDER / "gemv.cpp"))
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("avx2intrin.h" in read) == ("avx2" in instruction_sets())
    assert ("avx512fintrin.h" in read) == ("avx512f" in instruction_sets())
