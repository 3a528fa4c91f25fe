"""C++ functions of the files in `cpp/`: compiled where they are first called, and kept for all later processes.

A compiler takes about a second for one, and loading it again takes a millisecond. Inductor's cache would do both, but
importing Inductor takes seconds, and eager code should not wait for it. `cpp_cache` says where they are kept. Whatever
is in the way is a CompilationError, said once as a warning, and the caller computes by its definition.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from te_models.child_process import renew_in_forks, run_program

from . import cpp_cache
from .machine import instruction_sets

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
FOLDER = Path(__file__).resolve().with_name("cpp")
"""Where the C++ is; all of it is part of the package."""
_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_ERROR = re.compile(r"^(?:(.+?:\d+):(?:\d+:)? |.*?)(?:fatal )?error: (.*)", re.MULTILINE)
"""Of a compiler: file and line, and what is wrong there."""
_SECONDS = 300
"""Of a compilation, and of waiting for another process's."""


class CompilationError(RuntimeError):
    """A function cannot be compiled, or not be loaded; the message says why, in one sentence."""


class CppSource(NamedTuple):
    """A file of C++ and the macros that it is compiled with."""

    file: Path
    defined: tuple[tuple[str, str], ...]

    def macros(self) -> list[str]:
        return [f"-D{macro}={value}" for macro, value in self.defined]


def function(
    path: str | Path, defined: Mapping[str, str], name: str, arguments: Sequence[Any], result: Any = None
) -> Any:
    """Return the function `name` of a C++ file, compiled with these macros.

    path: from `FOLDER` on. arguments, result: the ctypes of the function; None: it returns nothing. Raises
    CompilationError, whatever is in the way.
    """
    library = _library(_source(path, defined))
    try:
        found = getattr(library, name)
    except AttributeError:
        raise CompilationError(f"the library that the C++ compiler made has no function {name}") from None
    found.argtypes, found.restype = arguments, result
    return found


def _source(path: str | Path, defined: Mapping[str, str]) -> CppSource:
    return CppSource(FOLDER / path, tuple(defined.items()))


_compiling = threading.Lock()
renew_in_forks(_compiling)


def _library(source: CppSource) -> ctypes.CDLL:
    with _compiling:  # threads may ask for the same one
        found = _loaded(source)
    if isinstance(found, str):
        raise CompilationError(found)
    return found


@functools.cache
def _loaded(source: CppSource) -> ctypes.CDLL | str:
    """Return the library of a source, or why there is none: of a compiler that fails, or hangs, once is enough."""
    try:
        name = _name(source)
        try:
            return _found_or_made(source, cpp_cache.shared_folder() / name)
        except TimeoutError:  # elsewhere the compiler takes as long
            raise
        except (OSError, ValueError, CompilationError) as error:
            found = _found_or_made(source, cpp_cache.private_folder() / name)
            _say(f"compiled C++ functions are kept for this process alone: {_sentence(error)}")
            return found
    except (OSError, ValueError, RuntimeError) as error:
        reason = _sentence(error)
    if "#error" not in reason:  # by which a source says that it is not for this processor
        _say(f"a C++ function is missing, and what runs in its place takes longer: {reason}")
    return reason


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


_said: set[str] = set()
_hung: list[str] = []
"""Why the compiler is asked no more."""


def _say(sentence: str) -> None:
    """Warn, once in a process."""
    if sentence not in _said:
        _said.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def _found_or_made(source: CppSource, file: Path) -> ctypes.CDLL:
    """Return the library that a file holds, or is to hold."""
    library = _found(file)
    if library is None:
        with cpp_cache.library_lock(file, _SECONDS) as alone:
            library = _found(file) or _made(source, file, alone)  # another process may have made it by now
    return library


def _found(file: Path) -> ctypes.CDLL | None:
    if cpp_cache.intact(file):
        with contextlib.suppress(OSError):  # of another system that shares the folder
            return ctypes.CDLL(str(file))
    return None


def _made(source: CppSource, file: Path, alone: bool) -> ctypes.CDLL:
    if cpp_cache.is_damaged(file):
        _say(f"{file} is not what was written there, and is compiled again")
    with cpp_cache.build_folder(file, alone) as folder:
        written = _compile(source, folder)
        try:
            library = ctypes.CDLL(str(written))  # so that only what can be loaded gets a name
        except OSError as error:
            raise CompilationError(f"what the C++ compiler {_command()[0]} made cannot be loaded: {error}") from None
        cpp_cache.publish(written, file)
        return library


def _name(source: CppSource) -> str:
    """Return the file name of the library of a source: other text of it or of what it includes, another processor or
    command has another one. Raises OSError where a file is missing."""
    parts = (
        *_files(source.file).values(),
        *source.macros(),
        *_command(),
        instruction_sets(),
        platform.system(),
        platform.machine(),
    )
    digest = hashlib.sha256(chr(0).join(parts).encode(errors="surrogateescape")).hexdigest()[:32]
    return f"{digest}-{source.file.stem}.so"


def _files(file: Path) -> dict[Path, str]:
    """Return the path and text of a file and of all that it includes between quotation marks, in their order."""
    found: dict[Path, str] = {}

    def read(path: Path) -> None:
        if path not in found:
            found[path] = path.read_text(encoding="utf-8")
            for name in _INCLUDED.findall(found[path]):
                beside = path.parent / name
                read(beside if beside.is_file() else FOLDER / name)

    read(file)
    return found


@functools.cache
def _command() -> tuple[str, ...]:
    """Return the compiler with its flags. CompilationError if no library can be had."""
    chosen = os.environ.get("CXX", "")
    try:
        asked = shlex.split(chosen)
    except ValueError as error:
        raise CompilationError(f"CXX is {chosen!r}, which is no command: {error}") from None
    # the current directory is not where a compiler is looked for
    places = os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))
    for compiler, *options in [asked] if asked else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(compiler, path=places)
        if path is not None:
            return (str(Path(path).absolute()), *options, *_FLAGS, *_THREADS)
    raise CompilationError("there is no C++ compiler")


def _compile(source: CppSource, folder: Path) -> Path:
    """Return the library of a source, written into a folder."""
    library, command = folder / "library.so", _command()
    if _hung:
        raise TimeoutError(_hung[0])
    arguments = (*source.macros(), "-I", str(FOLDER), str(source.file), "-o", str(library))
    try:
        status, said = run_program((*command, *arguments), folder, _SECONDS)
    except TimeoutError as error:
        _hung.append(f"the C++ compiler {command[0]} was killed: {error}")
        raise TimeoutError(_hung[0]) from None
    except OSError as error:
        raise CompilationError(f"the C++ compiler {command[0]} did not run: {error}") from None
    if status or not library.is_file():
        wrong = _ERROR.search(said)
        reason = ": ".join(filter(None, wrong.groups())) if wrong else f"exit status {status}"
        reason = reason.replace(f"{FOLDER}{os.sep}", "")
        raise CompilationError(f"the C++ compiler {command[0]} cannot compile a library: {reason}")
    return library
