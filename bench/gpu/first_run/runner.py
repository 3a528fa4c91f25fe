"""Runs one part in processes of its own: a limit for each case and for the whole, a new process after one that died."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.commit import ROOT

from .plan import Part
from .worker import UNUSABLE

_POLL = 0.05  # seconds
_SLOWER = 10  # times, that a case may take in a rehearsal
WORKER = "bench.gpu.first_run.worker"


def write_json(file: Path, value: Any) -> None:
    """Write a file that is whole or not there."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log; the last one may be cut."""
    if not file.exists():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


@dataclass
class Slot:
    """One of the processes that share a part's cases, and the ones started in its place.

    running: the case that has begun and not ended, and since when; failed: why no further process is started.
    """

    part: Part
    number: int
    of: int
    folder: Path
    rehearse: bool
    process: subprocess.Popen[bytes] | None = None
    skip: int = 0
    size: int = -1
    running: dict[str, Any] | None = None
    since: float = 0.0
    failed: str | None = None
    done: bool = False
    died: list[dict[str, Any]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.part.name}.{self.number}.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.part.name}.{self.number}.log"

    def start(self) -> None:
        """Start a process at the case `skip`."""
        command = [sys.executable, "-m", WORKER, self.part.module, "--log", str(self.log)]
        command += ["--slot", str(self.number), "--of", str(self.of), "--skip", str(self.skip)]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONFAULTHANDLER": "1"}
        if self.rehearse:
            command.append("--rehearse")
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def read(self) -> None:
        """Notice which case is running."""
        size = self.log.stat().st_size if self.log.exists() else 0
        if size == self.size:
            return
        self.size = size
        last = (read_lines(self.log) or [{}])[-1]
        running = last if "begun" in last else None
        if running != self.running:
            self.running, self.since = running, time.perf_counter()
        if "begun" in last or "at" in last:
            self.skip = 1 + last.get("begun", last.get("at"))
        self.done = "done" in last

    def step(self) -> None:
        """Go on after a process that has ended, end one whose case takes too long."""
        assert self.process is not None
        status = self.process.poll()
        self.read()
        if status is None:
            taken, most = time.perf_counter() - self.since, self.part.case_seconds * (_SLOWER if self.rehearse else 1)
            if self.running is None or taken <= most:
                return
            self.kill()
            self._died(f"it did not end within {most:g} s, and its process was ended")
        elif self.done:
            return
        elif self.running is not None:
            self._died(f"the process {how_it_ended(status)}", crashed=True)
        elif status != UNUSABLE:  # between two cases, so that a new one would come to the same
            tail = self.output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            self.failed = f"a process {how_it_ended(status)} outside of its cases: {' | '.join(tail)}"
            return
        self.start()

    def _died(self, why: str, **more: Any) -> None:
        assert self.running is not None
        line = {"at": self.running["begun"], "case": self.running["case"], "wrong": why} | more
        self.died.append(line)
        self.running = None
        with self.log.open("a", encoding="utf-8") as log:
            log.write("\n" + json.dumps(line) + "\n")


def how_it_ended(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def run_part(part: Part, seconds: float, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run a part for at most so many seconds; return what it found, and write it to FOLDER/<part>.json."""
    begun = time.perf_counter()
    workers = min(part.workers, max(1, (os.cpu_count() or 1) // 2), 1 if rehearse else part.workers)
    slots = [Slot(part, number, workers, folder, rehearse) for number in range(workers)]
    for slot in slots:
        for old in (slot.log, slot.output):
            old.unlink(missing_ok=True)
        slot.start()
    try:
        while time.perf_counter() - begun < seconds:
            open_slots = [slot for slot in slots if not slot.done and slot.failed is None]
            if not open_slots:
                break
            for slot in open_slots:
                slot.step()
            time.sleep(_POLL)
    finally:
        for slot in slots:
            slot.kill()
            slot.read()
    found = result(part, slots, seconds, time.perf_counter() - begun)
    write_json(folder / f"{part.name}.json", found)
    return found


def result(part: Part, slots: list[Slot], limit: float, taken: float) -> dict[str, Any]:
    """Return what is written of a part."""
    lines = [line for slot in slots for line in read_lines(slot.log) if "at" in line]
    cases = [{k: v for k, v in line.items() if k != "at"} for line in sorted(lines, key=lambda line: line["at"])]
    found: dict[str, Any] = {"part": part.name, "question": part.question, "limit_s": round(limit, 1)}
    found |= {"seconds": round(taken, 1), "workers": len(slots), "ran": len(cases)}
    found["wrong"] = sum("wrong" in case for case in cases)
    if any(not slot.done and slot.failed is None for slot in slots):
        found["cut_off"] = [slot.running["case"] for slot in slots if slot.running is not None]
    failures = [slot.failed for slot in slots if slot.failed is not None]
    if not cases and not failures:
        failures = [f"no case ended within {limit:.0f} s"]
    if failures:
        found["failed"] = failures
    return found | {"cases": cases}
