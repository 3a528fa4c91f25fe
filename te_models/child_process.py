"""Every child process of the project starts here, and none of them runs what lies in the current directory.

Python puts the current directory first on the path of what `python -m` and `python -c` import, and a compiler looks for
headers and temporary files there: a `numpy.py` in a downloaded model's folder would run. An interpreter is therefore
started isolated (`-I`) with the path of this process less that directory, and another program in a folder that its
caller has made. A test of the structure lets no other file start a process.

A leaf module: it imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.context import ForkContext


def _current_directory() -> str:
    try:
        return os.path.realpath(Path.cwd())
    except OSError:  # it was removed
        return ""


_STARTED_IN = _current_directory()
_starting = threading.Lock()
"""Held while a process starts. A fork at that moment would keep open the pipe that tells the thread which starts it
that it has, and the thread would wait for the end of the fork. The fork may wait for what the thread is to make."""
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)
_MODULE = """
import importlib.util, json, sys
_, paths, name, folder = sys.argv
sys.path[:] = json.loads(paths)
spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
"""


def import_path() -> list[str]:
    """Return `sys.path` without the current directory, the one that the process started in included, unless
    PYTHONPATH names it in full, or an installed package does (behind its own folder, as an editable one), and without
    entries that are relative to it."""
    packages = next((i for i, entry in enumerate(sys.path) if entry.endswith("site-packages")), len(sys.path))
    named = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path[packages:]}
    here = {_STARTED_IN, _current_directory()}
    return [
        entry
        for entry in sys.path
        if Path(entry).is_absolute() and (entry in named or os.path.realpath(entry) not in here)
    ]


def leave_current_directory() -> None:
    """Import nothing from the current directory any more, nor let an interpreter that a library starts do so: neither
    multiprocessing (it calls `python -c`) nor torch's compiler (it hands `sys.path` on as PYTHONPATH). For a process
    that is the command line's own."""
    sys.path[:] = import_path()
    os.environ["PYTHONSAFEPATH"] = "1"
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if Path(entry).is_absolute())


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    import subprocess

    with _starting:
        return subprocess.Popen(command, **options)


def run_module(
    module: str, text: str, *, told: Callable[[str], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `main` of a module of the project in an interpreter of its own, which reads a text from its standard input;
    return how it ended and what it printed. told: is called with each thing that it says by `tell`, when it does."""
    import subprocess
    import tempfile

    code = f"{_MODULE}from {module} import main\nmain()\n"  # of this package, wherever it was imported from
    arguments = [json.dumps(import_path()), module.partition(".")[0], str(Path(__file__).parent)]
    command = [sys.executable, "-I", "-c", code, *arguments]
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as printed:
        asked.write(text)
        asked.seek(0)
        errors = []
        with _start(command, stdin=asked, stdout=printed, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if not line.startswith(_TOLD):
                    errors.append(line)
                elif told is not None:
                    told(line.removeprefix(_TOLD).strip())
        printed.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, printed.read(), "".join(errors))


_TOLD = "\x1e"
"""Begins a line of a child's standard error that is for `told`."""


def tell(what: object) -> None:
    """Tell the process that runs this one by `run_module` something."""
    print(f"{_TOLD}{what}", file=sys.stderr, flush=True)


def start_script(file: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a script, whose arguments are these and as the last one its `sys.path` as JSON, in a new interpreter and a
    new session: Ctrl-C is this process's to answer. Pipes lead to its standard input and output. Raises OSError."""
    import subprocess

    return _start(
        [sys.executable, "-I", file, *arguments, json.dumps(import_path())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
        start_new_session=True,
    )


def exit_code(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process that is about to end; None: it has not ended after `seconds`."""
    import subprocess

    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode


def run_program(
    command: Sequence[str], folder: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a program, named by its whole path, in a folder; return its exit status, and what it said. environment: None
    is this process's in the C locale, with temporary files in the folder; the caller removes it then. Raises OSError
    where it does not start, and TimeoutError after `seconds`, when it is killed with all that it has started."""
    import signal
    import subprocess
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as output:  # no pipe: what the program left running could keep it open
        process = _start(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"LC_ALL": "C", "TMPDIR": str(folder)} if environment is None else environment,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it was not done after {seconds:g} seconds") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read().decode("utf-8", errors="replace")


def forks() -> ForkContext:
    """Return multiprocessing's context whose processes are forks of this one: no interpreter starts."""
    import multiprocessing

    return multiprocessing.get_context("fork")


def renew_in_forks(lock: Any) -> None:
    """Make a lock of the process free in its forks: the thread that holds it at that moment is not in them."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
