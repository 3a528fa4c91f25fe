"""Whole rehearsals of tiny models: what they write, that a killed one goes on, and what is refused."""

import json
import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from te_models.cli.main import main
from te_models.rehearse import Rehearsal, RehearsalOptions, rehearse
from te_models.rehearse.notebook import FILE
from te_models.rehearse.result import check_table
from te_models.rehearse.table import resolved
from te_models.training import PrecisionConfig, TrainConfig
from tests.compare import refused
from tests.fork_server import CONTEXT
from tests.training.processes import as_toml
from tests.training.runs import tiny_run

FEW = RehearsalOptions(formats=("mxfp8", "nvfp4"), steps=2, tokens=64, budget=20.0, variants=False)


def rehearsed(config: dict[str, Any], out: str, kill_after: int = 10**9) -> None:
    """Rehearse; SIGKILL this process while it is at work on the part after so many."""

    def report(done: int, total: int, what: str) -> None:
        if len((Path(out) / FILE).read_text().splitlines()) - 1 >= kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    rehearse(TrainConfig.from_dict(config), FEW, Path(out), report)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path, Rehearsal, list[tuple[int, int]]]:
    folder = tmp_path_factory.mktemp("rehearsal")
    config, seen = tiny_run(folder), []
    found = rehearse(config, FEW, folder / "whole", lambda done, total, what: seen.append((done, total)))
    return config, folder / "whole", found, seen


def test_the_table_gives_each_layer_what_was_found(whole: Any) -> None:
    _, out, found, seen = whole
    text = (out / "precision.toml").read_text()
    read = PrecisionConfig.from_dict(tomllib.loads(text)["precision"])
    assert read == found.precision and resolved(found.units, read, 2) == list(found.chosen.formats)
    assert f"{found.chosen.cost:.3f}" in text and "3 paired seeds" in text
    assert found.chosen.measured.mean <= FEW.budget and found.chosen.cost < 1
    assert all(done <= total for done, total in seen) and seen[-1][0] == seen[-1][1]
    refused(lambda: check_table(text, found.units, ["bf16"] * len(found.units), read), "does not give each layer")


def test_the_files_have_what_was_measured(whole: Any) -> None:
    _, out, _, _ = whole
    data = json.loads((out / "rehearsal.json").read_text())
    assert {*data["kl"]} == {"bf16", "mxfp8", "nvfp4"} and {*data["kl"]["nvfp4"]["layers"]} == {
        "decoder.layers.0",
        "decoder.layers.1",
    }
    assert data["kl"]["nvfp4"]["all"][0] > data["kl"]["mxfp8"]["all"][0] > 0
    noise = {name: data["errors"][name]["decoder.layers.0.mlp.linear_fc1"]["y"] for name in ("mxfp8", "nvfp4")}
    assert noise["mxfp8"] > noise["nvfp4"] + 8
    assert [one["name"] for one in data["tried"]][:2] == ["all nvfp4", "all mxfp8"]
    assert all(len(one["measured_gaps"]) == 3 for one in data["tried"])
    page = (out / "rehearsal.html").read_text()
    assert "<svg" in page and "decoder.layers.1.mlp.linear_fc2" in page and "dw" in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_killed_rehearsal_measures_the_rest_and_finds_the_same(whole: Any, tmp_path: Path) -> None:
    config, first, _, _ = whole
    out = tmp_path / "again"
    child = CONTEXT.Process(target=rehearsed, args=(config.to_dict(), str(out), 7))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL
    lines = (out / FILE).read_text().splitlines()
    assert len(lines) == 8 and not (out / "precision.toml").exists()
    with (out / FILE).open("a") as file:
        file.write('{"part": "kl nvf')  # cut short
    found = rehearse(config, FEW, out)
    after = (out / FILE).read_text().splitlines()
    assert after[:8] == lines and len({json.loads(line).get("part") for line in after}) == len(after)
    for name in ("precision.toml", "rehearsal.json", "rehearsal.html"):
        assert (out / name).read_bytes() == (first / name).read_bytes(), name
    rehearse(config, FEW, out)
    assert (out / FILE).read_text().splitlines() == after and found.chosen.formats


def test_another_rehearsal_is_not_mixed_in(whole: Any) -> None:
    config, out, _, _ = whole
    other = config.replace(optimizer=config.optimizer.replace(lr=1.0))
    with pytest.raises(ValueError, match=r"has a rehearsal with other settings \(optimizer\); choose another --output"):
        rehearse(other, FEW, out)
    (out.parent / "damaged").mkdir()
    (out.parent / "damaged" / FILE).write_text("no JSON\n")
    with pytest.raises(ValueError, match=rf"{FILE}, line 1 is damaged; move the file away"):
        rehearse(config, FEW, out.parent / "damaged")


def test_a_format_that_diverges_is_left_out(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and so is everything where all do; bf16 that diverges is an error."""
    config, first, _, _ = whole

    def diverging(names: tuple[str, ...]) -> Rehearsal:
        out = tmp_path / "-".join(names)
        out.mkdir()
        lines = [json.loads(line) for line in (first / FILE).read_text().splitlines()]
        for line in lines[1:]:
            line["value"] = (
                None if line["part"].startswith(tuple(f"train {name} " for name in names)) else line["value"]
            )
        (out / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return rehearse(config, FEW, out)

    monkeypatch.setattr("te_models.rehearse.run.train_briefly", lambda *_, **__: {"loss": 6.0})
    found = diverging(("nvfp4",))
    assert found.diverged == ["nvfp4"] and "nvfp4" not in found.chosen.formats
    assert "A short run under nvfp4 had a loss that is not finite." in found.evidence()
    assert {*diverging(("nvfp4", "mxfp8")).chosen.formats} == {"bf16"}
    refused(lambda: diverging(("bf16",)), "a short run in bf16 has a loss that is not finite", error=RuntimeError)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeds": 2}, "--seeds is 2; allowed: 3 to 100"),
        ({"budget": 0.0}, "--budget is 0.0; allowed: a percentage above 0 and below 100"),
        ({"layers": 0}, "--layers is 0; allowed: a positive integer"),
        ({"formats": ()}, "no format is named; allowed: delayed"),
        ({"tokens": 1}, "--tokens is 1; allowed: at least 2"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], sentence: str) -> None:
    refused(lambda: RehearsalOptions(**options), sentence)


def test_runs_that_are_not_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    lora = tiny_run(tmp_path).lora.replace(rank=4)
    file.write_text(as_toml(tiny_run(tmp_path, lora=lora)))
    assert main(["rehearse", str(file)]) == 2
    assert "lora.rank is 4; allowed in a rehearsal: 0" in capsys.readouterr().err
    file.write_text(as_toml(tiny_run(tmp_path)))
    assert main(["rehearse", str(file), "--formats", "fp8"]) == 2
    assert "the format 'fp8' is unknown" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rehearse", str(file), "--budget", "little"])
    assert "--budget is 'little'; allowed: a percentage such as 0.5%" in capsys.readouterr().err
    assert not (tmp_path / "run-rehearsal").exists()


def test_the_verb_prints_what_it_recommends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny run of one format, and exit code 1 where none stays within the budget."""
    file = tmp_path / "run.toml"
    file.write_text(as_toml(tiny_run(tmp_path)))
    words = ["rehearse", str(file), "--formats", "nvfp4-nearest", "--steps", "1", "--tokens", "32", "--layers", "1"]
    code = main([*words, "--budget", "30%", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {"nvfp4", "nvfp4-nearest", "nvfp4-1d"} <= {*printed["errors"]}
    assert code == 0 and printed["precision"]["recipe_options"] == ["disable_stochastic_rounding=true"]
    assert Path(printed["table"]).is_file() and printed["options"]["budget"] == 30.0
    assert main([*words, "--budget", "0.000001%"]) in (0, 1)
    assert "Relative time of its GEMMs, bf16 = 1: " in capsys.readouterr().out
