"""C++ functions without torch's headers: compiled where they are first called, and kept for all later processes.

A compiler takes about a second for one, and loading it again takes a millisecond. Inductor's cache would do both, but
importing Inductor takes seconds, which eager code need not wait for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import cache_folder, instruction_sets

_ARM = platform.machine().lower() in ("arm64", "aarch64")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-mcpu=native" if _ARM else "-march=native",
    "-ffp-contract=off",  # a product and a sum are rounded one after the other, as torch rounds them
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
)
_THREADS = ("-Xpreprocessor", "-fopenmp", "-lomp") if sys.platform == "darwin" else ("-fopenmp",)
_SECONDS = 300


class CompilationError(RuntimeError):
    """There is no C++ compiler, or it cannot compile a function; the message says which, in one sentence."""


def function(code: str, defined: Mapping[str, str], name: str, arguments: Sequence[Any], result: Any = None) -> Any:
    """Return the function `name` of C++ code under these macros.

    arguments, result: the ctypes of its own; None: it returns nothing. Raises CompilationError.
    """
    found = getattr(_library(_source(code, defined)), name)
    found.argtypes, found.restype = arguments, result
    return found


def is_cached(code: str, defined: Mapping[str, str]) -> bool:
    """Whether the library of C++ code under these macros is there already."""
    try:
        return _file(_source(code, defined)).exists()
    except CompilationError:
        return False


def _source(code: str, defined: Mapping[str, str]) -> str:
    return "".join([f"#define {macro} {value}\n" for macro, value in defined.items()]) + code


_compiling = threading.Lock()


def _library(source: str) -> ctypes.CDLL:
    with _compiling:  # threads may ask for the same one
        return _loaded(source)


@functools.cache
def _loaded(source: str) -> ctypes.CDLL:
    file = _file(source)
    if file.exists():
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # of another system that shares the folder, or damaged
            pass
    _compile(source, file)
    return ctypes.CDLL(str(file))


def _file(source: str) -> Path:
    """Return where the library of a source is kept: another source, processor or command has another one."""
    parts = (source, *_command(), instruction_sets(), platform.system(), platform.machine())
    return _folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


@functools.cache
def _command() -> tuple[str, ...]:
    """Return the compiler with its flags. CompilationError where there is none."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for compiler, *options in [asked] if asked else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(compiler)
        if path is not None:
            return (path, *options, *_FLAGS, *_THREADS)
    raise CompilationError("there is no C++ compiler")


def _compile(source: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        text, library = Path(scratch) / "source.cpp", Path(scratch) / "library.so"
        text.write_text(source)
        command = (*_command(), str(text), "-o", str(library))
        options = {"capture_output": True, "text": True, "timeout": _SECONDS, "env": os.environ | {"LC_ALL": "C"}}
        try:
            ended = subprocess.run(command, **options)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilationError(f"the C++ compiler {command[0]} did not run: {error}") from None
        if ended.returncode or not library.exists():
            _, _, reason = ended.stderr.partition("error: ")
            reason = reason.partition("\n")[0] or f"exit status {ended.returncode}"
            raise CompilationError(f"the C++ compiler {command[0]} cannot compile a library: {reason}")
        library.replace(file)  # whole, or not there, for processes that compile at once


def _folder() -> Path:
    """Return the folder of the libraries: the machine's, or where that cannot be written, one of this process."""
    return _writable(cache_folder() / "cpp")


@functools.cache
def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        temporary = tempfile.TemporaryDirectory(prefix="te_models-cpp-")
        _temporary.append(temporary)  # removed with the process
        return Path(temporary.name)


_temporary: list[tempfile.TemporaryDirectory] = []
