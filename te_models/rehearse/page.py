"""A rehearsal as one HTML file that loads nothing: results, Pareto curve, KL by layer, and a heat map of errors."""

from collections.abc import Sequence
from html import escape
from typing import Any

from ..training.log.report import STYLE
from ..training.log.svg import COLORS, ChartLine, chart
from .errors import OPERANDS, PRODUCTS
from .observe import unit_groups
from .result import Rehearsal, gap_text
from .table import toml_of

_LOW, _HIGH = 5.0, 45.0
"""Signal to noise in decibels at the two ends of the colours."""
_SHADES = 9
_HEAT = """
table.heat td { text-align: right; padding: .05rem .35rem; font-variant-numeric: tabular-nums; }
table.heat td:first-child, table.heat th { text-align: left; white-space: nowrap; padding-right: .6rem; }
.lost { text-decoration: underline dotted; }
""" + "".join(f".h{i} {{ background: hsl({i * 15} 70% 50% / .45); }}\n" for i in range(_SHADES + 1))


def rehearsal_page(found: Rehearsal) -> str:
    """Return the page as HTML."""
    title = escape(f"Rehearsal of {found.model}")
    evidence = found.evidence()
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in evidence)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}{_HEAT}</style></head><body>
<h1>{title}</h1>
<h2>Recommended</h2><ul>{sentences}</ul><pre>{escape(toml_of(found.precision, []))}</pre>
<h2>Loss gap against GEMM time</h2>{_pareto(found)}{_tried(found)}
<h2>KL to high precision by layer</h2>{_divergence(found)}{_whole(found)}
<h2>Signal to quantization noise in decibels</h2>
<p>Of the operands of each product, and of the three products: y = x w<sup>T</sup>, dx = dy w, dw = dy<sup>T</sup> x.
A dotted line marks operands of which values were flushed to zero or saturated, or scales are pinned; the tooltip has
the shares.</p>{_heat_maps(found)}
</body></html>
"""


def _pareto(found: Rehearsal) -> str:
    names = ("predicted", "predicted front"), ("measured", "measured")
    front = ChartLine(points=[(p.cost, p.gap) for p in found.front], color=COLORS[0], name=names[0][1])
    runs = sorted((one.cost, one.measured.mean) for one in [*found.tried, found.chosen])
    measured = ChartLine(points=runs, color=COLORS[1], name="measured", kind="dots")
    budget = found.options.budget
    ends = [found.front[0].cost, 1.0] if found.front else [0.0, 1.0]
    line = ChartLine(points=[(x, budget) for x in ends], color=COLORS[2], name="budget", kind="faint")
    drawn = chart("loss gap in %", [front, measured, line], axis="relative GEMM time, bf16 = 1")
    legend = "".join(
        f'<span><span class="key" style="background:{color}"></span>{name}</span> '
        for color, name in zip(COLORS, ("predicted", "measured", "budget"), strict=False)
    )
    return f"<p>{legend}</p><figure>{drawn}</figure>"


def _tried(found: Rehearsal) -> str:
    rows = [("assignment", "GEMM time", "predicted gap", "measured gap", "within the prediction")]
    for one in found.tried:
        within = "yes" if one.predicted.holds(one.measured.mean) else "no"
        rows.append((one.name, f"{one.cost:.3f}", gap_text(one.predicted), gap_text(one.measured), within))
    return _table(rows)


def _divergence(found: Rehearsal) -> str:
    order = {group: i for i, group in enumerate(unit_groups(found.units))}
    lines = []
    for i, (name, values) in enumerate(found.divergence.items()):
        points = sorted((float(order[group]), kl[0]) for group, kl in values["layers"].items())
        if points:
            lines.append(ChartLine(points=points, color=COLORS[i % len(COLORS)], name=name))
    legend = " ".join(
        f'<span><span class="key" style="background:{line.color}"></span>{escape(line.name)}</span>' for line in lines
    )
    return f"<p>{legend}</p><figure>{chart('KL, nats per token', lines, axis='layer')}</figure>"


def _whole(found: Rehearsal) -> str:
    rows = [("format", "KL with all layers", "standard error", "sum over single layers")]
    for name, values in found.divergence.items():
        own = sum(kl[0] for kl in values["layers"].values())
        rows.append((name, f"{values['all'][0]:.3g}", f"{values['all'][1]:.2g}", f"{own:.3g}" if own else "-"))
    return _table(rows)


def _heat_maps(found: Rehearsal) -> str:
    parts = []
    for name, units in found.errors.items():
        if not units:
            continue
        head = "".join(f"<th>{column}</th>" for column in (*OPERANDS, *PRODUCTS))
        rows = "".join(
            f"<tr><td><code>{escape(unit)}</code></td>{''.join(_cell(values, c) for c in (*OPERANDS, *PRODUCTS))}</tr>"
            for unit, values in units.items()
        )
        table = f'<div class="wide"><table class="heat"><tr><th></th>{head}</tr>{rows}</table></div>'
        opened = " open" if name in found.chosen.formats else ""
        parts.append(f"<details{opened}><summary>{escape(name)}</summary>{table}</details>")
    return "".join(parts)


def _cell(values: dict[str, Any], column: str) -> str:
    value = values.get(column)
    if value is None:
        return '<td class="dim">-</td>'
    shade = round(_SHADES * min(max((value - _LOW) / (_HIGH - _LOW), 0.0), 1.0))
    role = column.partition(".")[0]
    shares = {what: values.get(f"{role}.{what}", 0.0) for what in ("flushed", "saturated", "pinned")}
    lost = [f"{what} {100 * share:.3g} %" for what, share in shares.items() if share > 0 and "." in column]
    told = f' title="{", ".join(lost)}"' if lost else ""
    return f'<td class="h{shade}{" lost" if lost else ""}"{told}>{value:.1f}</td>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rest = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f'<div class="wide"><table><tr>{first}</tr>{rest}</table></div>'
