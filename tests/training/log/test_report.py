"""The report of runs is one file that loads nothing and has what the folders have, several runs side by side."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from te_models.cli.main import main
from te_models.training import EvaluationConfig, MetricsError, train
from te_models.training.log.report import RunRecord, gaps, report_page, write_report
from te_models.training.log.starts import read_starts, record_start
from te_models.training.log.svg import MOST_POINTS, thinned, ticks
from tests.training.runs import tiny_run

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects attributes that could load something, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.elements: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def write_run(folder: Path, losses: list[float], **changes: object) -> None:
    """A folder with metrics and two starts, the second from step 2."""
    folder.mkdir()
    rows = [
        {"step": n, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": 64 * n} for n, loss in enumerate(losses, 1)
    ]
    rows[2]["skipped"] = True
    rows[-1] |= {"validation_loss": 1.5, "validation_losses": {"<code>": 1.25}}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_run(folder).replace(steps=len(losses), **changes)
    for step in (0, 2):
        record_start(folder, config, step, "cpu", ranks=2)


def test_two_runs_stand_side_by_side_in_a_page_that_loads_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [4.0, 3.0, 2.0, 2.0])
    write_run(tmp_path / "b", [4.0, 3.0, 2.0, 3.0], seed=7)
    out = tmp_path / "report.html"
    write_report([tmp_path / "a", tmp_path / "b"], out)
    text = out.read_text()
    found = Page(text)
    assert found.loads == [] and not {"script", "link", "img", "iframe"} & {*found.elements}
    assert not re.search(r"url\(|@import|https?:", text) and "default-src 'none'" in text
    assert found.elements.count("svg") == 5  # loss, further sets, distance, learning rate, gradient norm
    for words in ("skipped steps: 3", "continued from step 2 on 2 ranks", "finished", "1.5000 (best 1.5000 at step 4)"):
        assert words in found.text
    first, _, folded = found.text[found.text.index("Configuration") :].partition("equal rows")
    assert {"output_dir", "seed"} < {*first.split()} and "optimizer.lr" not in first and "optimizer.lr" in folded
    assert "<title>a, step 2: 3</title>" in text and 'text-anchor="middle">step</text>' in text
    assert re.search(r"<text [^>]*rotate\(-90[^>]*>Gradient norm</text>", text)
    assert "validation loss of <code>" in found.text  # escaped, so that it is text
    first, second = [RunRecord.read(tmp_path / name, name) for name in "ab"]
    assert gaps([first, second])[0].points == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 50.0)]
    assert "Loss, % from" not in report_page([first])


def test_a_run_records_its_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path, steps=2, evaluation=EvaluationConfig(every=1, batches=1))
    train(config)
    (tmp_path / "run" / "final").rename(tmp_path / "gone")
    train(config)
    starts = read_starts(tmp_path / "run")
    assert [start["step"] for start in starts] == [0, 2]
    assert starts[0]["config"]["optimizer"] == config.optimizer.to_dict() and starts[0]["environment"]["ranks"] == 1
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"] == str(tmp_path / "run" / "report.html")
    assert result["runs"]["run"]["steps"] == "2 of 2" and "<svg" in Path(result["report"]).read_text()


def test_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    sentence = f"{tmp_path} has no metrics.jsonl with a step; allowed: the output_dir of a training run"
    assert capsys.readouterr().err == f"te-models: {sentence}\n"
    (tmp_path / "metrics.jsonl").touch()
    for inside in ("final", "checkpoints/step-00000001"):
        assert main(["report", str(tmp_path / inside)]) == 2
        assert f"allowed: the output_dir of a training run, which {tmp_path} is" in capsys.readouterr().err
    (tmp_path / "starts.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(MetricsError, match=r"starts.jsonl, line 1 is no start of a run"):
        read_starts(tmp_path)


def test_axes_have_round_numbers_and_long_lines_keep_their_extremes() -> None:
    assert ticks(0.0, 6.2) == [0, 1, 2, 3, 4, 5, 6] and ticks(-0.004, 0.011) == [0.0, 0.005, 0.01]
    points = [(float(i), math.sin(i)) for i in range(20000)]
    points[777] = (777.0, 50.0)
    found = thinned(points)
    assert len(found) <= MOST_POINTS + 2 and (777.0, 50.0) in found and found == sorted(found)
