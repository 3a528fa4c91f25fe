"""Pictures show what the metrics file has: a smoothed curve over the raw one, learning rate, gradient norm, gaps."""

import json
from pathlib import Path
from typing import Any

import pytest

from te_models.training import plot_loss
from te_models.training.log import curves
from te_models.training.log.curves import plot_gaps, running_mean, span_of

pytest.importorskip("matplotlib", reason="draws the pictures (extra plot)")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    saved: list[Any] = []
    save = curves.save_figure
    monkeypatch.setattr(curves, "save_figure", lambda figure, out: (saved.append(figure), save(figure, out)))
    return saved


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_running_mean_begins_with_what_there_is() -> None:
    assert running_mean([1.0, 2.0, 3.0, 5.0], 2) == [1.0, 1.5, 2.5, 4.0]
    assert [span_of(steps) for steps in (0, 6, 100, 10**6)] == [1, 1, 2, 100]


def test_the_picture_of_a_run_has_three_panels(tmp_path: Path, figures: list[Any]) -> None:
    rows = [
        {"step": n, "loss": float(n % 2), "lr": n / 100, "grad_norm": 2.0 if n > 1 else None} for n in range(1, 101)
    ]
    rows[-1]["validation_loss"] = 0.25
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_loss({"run": tmp_path / "m.jsonl"}, tmp_path / "loss.png")
    loss, lr, norm = figures[0].axes
    lines = lines_of(loss)
    assert lines["run, mean of 2 steps"][1] == [1.0] + [0.5] * 99
    assert [row["loss"] for row in rows] in [values for _, values in lines.values()]
    assert lines["run, validation"] == ([100], [0.25])
    assert next(iter(lines_of(lr).values()))[1] == [row["lr"] for row in rows]
    assert next(iter(lines_of(norm).values())) == ([*range(2, 101)], [2.0] * 99)
    labels = [axes.get_ylabel() for axes in figures[0].axes]
    assert labels == ["loss (nats per token)", "learning rate", "gradient norm"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # nothing half-written


def test_gaps_are_percent_of_the_reference_run(tmp_path: Path, figures: list[Any]) -> None:
    losses = {"bf16": [4.0, 2.0, 2.0], "mxfp8": [4.0, 3.0, 3.0]}
    plot_gaps(losses, tmp_path / "gaps.png", span=2, title="4 experts", reference="bf16")
    above, below = figures[0].axes
    assert lines_of(above)["mxfp8"] == ([2, 3], [3.5, 3.0])
    zero, gap = lines_of(below).values()
    assert zero == ([2, 3], [0.0, 0.0]) and gap[1] == pytest.approx([100 / 6, 50.0])
    assert (above.get_title(), below.get_ylabel()) == ("4 experts", "% from bf16")
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
