"""Python processes for tests that need one of their own, forked from a server that has imported torch already.

A new interpreter spends seconds on imports; a test whose claim is the process (that it dies, that it is one of two
ranks) needs none of that. Where the interpreter is the claim (what is imported, memory, warnings at start), use
subprocess."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("pytest", "hypothesis.strategies", "torch", "tests.compiler_costs"),
        *("torch.distributed.tensor", "te_models.training.loop"),
    ]
)


LIVE: dict[int, float] = {}
"""Processor seconds of forks that go on from test to test, as each last said, by their process numbers."""


class Python:
    """`python ARGUMENTS` in a fork: "-m", module, ...; "-c", code, ...; or script, ....

    env: the whole environment, this process's by default. fresh: in an interpreter of its own after all, whose hashes
    of texts are others. What it prints goes to files, for `finish`."""

    def __init__(
        self, arguments: list[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT, fresh: bool = False
    ) -> None:
        self.arguments = arguments
        self._printed = tempfile.TemporaryDirectory()
        self._files = [Path(self._printed.name) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        self.process: BaseProcess = CONTEXT.Process(
            target=_run, args=(arguments, environment, str(cwd), *map(str, self._files), fresh)
        )
        self.process.start()

    def finish(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the end; return exit code, standard output and error. After `timeout` seconds it is killed."""
        self.process.join(timeout)
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        stdout, stderr = (file.read_text() if file.exists() else "" for file in self._files)
        self.kill()
        if late:
            raise subprocess.TimeoutExpired(self.arguments, timeout, stdout, stderr)
        assert self.process.exitcode is not None
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, stdout, stderr)

    def kill(self) -> None:
        """End it, if it still runs, and forget what it printed."""
        self.process.kill()
        self.process.join()
        self._printed.cleanup()


def run_python(
    arguments: list[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 1800
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end."""
    return Python(arguments, env=env, cwd=cwd).finish(timeout)


def processor_time() -> float:
    """Return the processor time, in seconds, of this process, its children that have ended, and the fork server with
    its own and those that go on."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system + sum(LIVE.values())
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no server yet, or no Linux
        return total
    return total + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _run(arguments: list[str], environment: dict[str, str], cwd: str, stdout: str, stderr: str, fresh: bool) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for descriptor, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if fresh:
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, cwd)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, cwd)
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")
