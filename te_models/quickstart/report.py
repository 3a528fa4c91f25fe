"""What the quickstart checked: measured numbers beside their bounds."""

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SILENCE = 9.0
"""Seconds after which a line says that the run goes on: looked at ten times as often, so that ten never pass."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `measured` and `required` are for people, `value` and `bound` for programs."""

    step: str
    what: str
    measured: str
    required: str
    passed: bool
    value: float
    bound: float


@dataclass
class QuickstartReport:
    """Collects checks and numbers while the steps run, and tells the user what is going on."""

    verbose: bool = True
    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)
    _step: str = ""
    _started: float = field(default_factory=time.perf_counter)
    _step_started: float = field(default_factory=time.perf_counter)
    _said: float = field(default_factory=time.perf_counter)
    _doing: Callable[[], str] | None = None

    def begin(self, step: str) -> None:
        """Start a step: its name heads the checks that follow."""
        self.end()
        self._step, self._step_started = step, time.perf_counter()
        self.say(f"\n{step}")

    def end(self) -> None:
        """Stop the clock of the current step and note the peak of memory so far."""
        if self._step:
            self.seconds[self._step] = round(time.perf_counter() - self._step_started, 1)
            self.peak_gib[self._step] = round(peak_rss_gib(), 2)
            self._step = ""

    def say(self, text: str) -> None:
        """Tell the user, at once."""
        self._said = time.perf_counter()
        if self.verbose:
            print(text, flush=True)

    @contextlib.contextmanager
    def heartbeat(self, silence: float = SILENCE) -> Iterator[None]:
        """Inside, a thread says what is going on whenever nothing was said for `silence` seconds."""
        if not self.verbose:
            yield
            return
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(silence / 10):
                now = time.perf_counter()
                if now - self._said >= silence:
                    self.say(f"  ... {self.doing()}, {now - self._step_started:.0f} s")

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def doing(self) -> str:
        """Return what is going on: the step, or what `working` says."""
        return self._doing() if self._doing is not None else self._step or "starting"

    @contextlib.contextmanager
    def working(self, what: Callable[[], str]) -> Iterator[None]:
        """Inside, `what` returns what is going on."""
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    def at_most(self, what: str, value: float, bound: float, digits: int = 3) -> None:
        """Check `value <= bound`; a NaN fails."""
        self._add(what, value, bound, f"{value:.{digits}g}", f"<= {bound:.{digits}g}", value <= bound)

    def same(self, what: str, different: int, of: int, unit: str) -> None:
        """Check that `different` of `of` compared things is 0, and that something was compared."""
        measured = f"{of} {unit} equal" if not different else f"{different} of {of} {unit} differ"
        self._add(what, float(different), 0.0, measured, "bit for bit", different == 0 and of > 0)

    def _add(self, what: str, value: float, bound: float, measured: str, required: str, passed: bool) -> None:
        self.checks.append(Check(self._step, what, measured, required, passed, float(value), float(bound)))
        self.say(f"  {'ok  ' if passed else 'FAIL'} {what}: {measured} ({required})")

    @property
    def passed(self) -> bool:
        """Whether there are checks and all of them passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def table(self) -> str:
        """Return the checks as an aligned table."""
        rows = [("step", "checked", "measured", "required", "")]
        last = ""
        for check in self.checks:
            step = check.step if check.step != last else ""
            rows.append((step, check.what, check.measured, check.required, "ok" if check.passed else "FAIL"))
            last = check.step
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def wall_seconds(self) -> float:
        """Seconds since the report was made."""
        return time.perf_counter() - self._started

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "passed": self.passed,
            "checks": [vars(check) for check in self.checks],
            "numbers": self.numbers,
            "seconds": self.seconds,
            "peak_gib_until": self.peak_gib,
            "wall_seconds": round(self.wall_seconds(), 1),
            "peak_rss_gib": round(peak_rss_gib(), 2),
        }


def peak_rss_gib() -> float:
    """The largest resident set of this process or of one of its children (compilers), so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak * unit / 2**30
