"""Rows of results, the table that people read and the JSON that is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .case import Case


@dataclass(frozen=True)
class Row:
    """One side of one case.

    rate: GB/s or TFLOP/s; of_ceiling: share of the copy's bandwidth or the bf16 product's rate; over: the fastest of
    the sides that it is compared with; speed: their time divided by its own; target: what `of_ceiling` (GB/s) or
    `speed` (TFLOP/s) should reach; met: whether it does.
    """

    section: str
    case: str
    side: str
    us: float
    rate: float
    unit: str
    of_ceiling: float
    over: str | None = None
    speed: float | None = None
    target: float | None = None
    met: bool | None = None


@dataclass(frozen=True)
class Gap:
    """Something that was not measured: a case, or one side of it. failed: because it went wrong."""

    section: str
    what: str
    why: str
    failed: bool = False


def rows_of(section: str, case: Case, seconds: dict[str, float], ceilings: dict[str, Any]) -> list[Row]:
    """Turn each side's seconds into a row."""
    rows = []
    for side, taken in seconds.items():
        if case.nbytes is not None:
            rate, unit, ceiling = case.nbytes / taken, "GB/s", ceilings["copy_bytes_per_s"]
            scale = 1e9
        else:
            assert case.flops is not None, "a case counts bytes or flops"
            rate, unit, ceiling = case.flops / taken, "TFLOP/s", ceilings["bf16_flop_per_s"]
            scale = 1e12
        others = [name for name in case.over.get(side, ()) if name in seconds]
        over = min(others, key=seconds.__getitem__) if others else None
        speed = None if over is None else round(seconds[over] / taken, 3)
        share, target = round(rate / ceiling, 3), case.targets.get(side)
        reached = share if unit == "GB/s" else speed
        met = None if target is None or reached is None else reached >= target
        rows.append(
            Row(
                section,
                case.name,
                side,
                round(taken * 1e6, 1),
                round(rate / scale, 1),
                unit,
                share,
                over,
                speed,
                target,
                met,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return rows as aligned text, one block per section."""
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in rows):
        mine = [row for row in rows if row.section == section]
        cells = [("case", "side", "us", "rate", "of ceiling", "speed over", "target", "")]
        cells += [_cells(row) for row in mine]
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        left = (0, 1, 5)
        lines += ["", f"== {section}"]
        for line in cells:
            padded = (
                c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines[1:])


def _cells(row: Row) -> tuple[str, ...]:
    percent = row.unit == "GB/s"
    target = "" if row.target is None else f"{row.target:.0%}" if percent else f"{row.target:.2f}x"
    verdict = "" if row.met is None else "met" if row.met else "MISSED"
    speed = "" if row.speed is None else f"{row.speed:.2f}x {row.over}"
    rate = f"{row.rate:.0f} {row.unit}"
    return row.case, row.side, f"{row.us:.1f}", rate, f"{row.of_ceiling:.0%}", speed, target, verdict


def gaps_text(gaps: list[Gap]) -> str:
    """Return what was not measured, a line each with the reason."""
    return "\n".join(f"{'FAILED' if g.failed else 'not run'}: {g.section}: {g.what}: {g.why}" for g in gaps)


def payload(rows: list[Row], gaps: list[Gap], **about: Any) -> dict[str, Any]:
    """Return what is written down."""
    return about | {"rows": [asdict(row) for row in rows], "not_measured": [asdict(gap) for gap in gaps]}
