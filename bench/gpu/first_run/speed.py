"""Part 7: the cases of `python -m bench.gpu` by priority, each against its peers in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from bench.gpu import report
from bench.gpu.__main__ import SECTIONS
from bench.gpu.case import Case
from bench.gpu.shapes import H100, Shapes
from bench.gpu.timing import CudaTimer, Timer, ceilings, measure

from .setting import Setting

_PRIORITY = ("quantize", "scaled", "grouped", "norms", "permute", "linear")
_SECONDS = 0.3
"""That a side is measured for, less than `python -m bench.gpu` takes."""


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the first case of every section, then the second of every one."""
    shapes, timer = _rehearsal() if setting.rehearse else (H100, None)
    timer = timer or CudaTimer(setting.device)
    found = cache(partial(ceilings, setting.device, timer, megabytes=shapes.copy_megabytes, size=shapes.matmul))
    yield "a copy and a bf16 product", lambda: {"ceilings": found(), "says": _in_words(found())}
    waiting = {section: SECTIONS[section](setting.device, shapes) for section in _PRIORITY}
    at = 0
    while waiting:
        for section, builds in list(waiting.items()):
            build = next(builds, None)
            if build is None or (setting.rehearse and at):
                del waiting[section]
            else:
                yield f"{section} {at}", partial(_measured, section, build, timer, found)
        at += 1


def _rehearsal() -> tuple[Shapes, Timer]:
    """Send the calls to Triton's interpreter, and time nothing."""
    import torch

    from tests.bench.on_triton import TINY, use_triton
    from tests.patches import Patches

    use_triton(Patches())
    torch.compile = lambda module, **options: module  # type: ignore[assignment]

    def one_second(run: Callable[[], Any]) -> float:
        run()
        return 1.0

    return TINY, one_second


def _in_words(found: dict[str, Any]) -> str:
    copied, product = found["copy_bytes_per_s"] / 1e9, found["bf16_flop_per_s"] / 1e12
    return f"{copied:.0f} GB/s, {product:.0f} TFLOP/s ({found['what']})"


def _measured(
    section: str, build: Callable[[], Case], timer: Timer, found: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Check a case's results, then time its sides in turn. WrongResultError where one is wrong."""
    case = build()
    case.check({name: side() for name, side in case.sides.items()})
    rows = report.rows_of(section, case, measure(case.sides, timer, seconds=_SECONDS), found())
    says = f"{case.name}: {'; '.join(map(_row_in_words, rows))}"
    return {"rows": [asdict(row) for row in rows], "missing": case.missing, "says": says}


def _row_in_words(row: report.Row) -> str:
    text = f"{row.side} {row.us:.1f} us, {row.rate:.0f} {row.unit}, {row.of_ceiling:.0%} of the ceiling"
    text += "" if row.over is None else f", {row.speed:.2f} times the speed of {row.over}"
    return text if row.met is not False else f"{text}, below its target of {row.target}"
