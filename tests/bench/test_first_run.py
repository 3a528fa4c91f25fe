"""The mechanics of a GPU's first run: limits, processes that die, JSON after every part, the summary, the status."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.first_run import __main__ as command
from bench.gpu.first_run import runner
from bench.gpu.first_run.plan import PARTS, Part
from bench.gpu.first_run.setting import untimed_tiles
from bench.gpu.first_run.summary import in_words

CASES = "tests.bench.first_run_cases"


def part(name: str, **options: Any) -> Part:
    return Part(name, CASES, f"what {name} is", **{"seconds": 60, "least": 1} | options)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run one part with the named cases."""
    monkeypatch.setattr(runner, "WORKER", CASES)
    monkeypatch.setenv("FIRST_RUN_CHILD", str(tmp_path / "child"))

    def function(cases: str, seconds: float = 60, **options: Any) -> dict[str, Any]:
        monkeypatch.setenv("FIRST_RUN_CASES", cases)
        return runner.run_part(part("some", **options), seconds, tmp_path, rehearse=False)

    return function


def test_a_case_that_is_wrong_raises_or_dies_does_not_end_the_others(run: Any, tmp_path: Path) -> None:
    found = run("right wrong dies raises leaves right")
    assert [case["case"] for case in found["cases"]] == [
        *("right 0", "wrong 1", "dies 2", "raises 3", "leaves 4", "right 5")
    ]
    why = [case.get("wrong") for case in found["cases"]]
    error = "RuntimeError: CUDA error: misaligned address"
    assert why == [None, "3 of 4 values differ", "the process was killed by SIGSEGV", error, error, None]
    assert (found["ran"], found["wrong"], "failed" in found, "cut_off" in found) == (6, 4, False, False)
    assert "misaligned" in " ".join(found["cases"][3]["trace"])
    assert json.loads((tmp_path / "some.json").read_text()) == found


def gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):  # whoever adopted it has to notice
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_case_that_hangs_is_ended_with_what_it_started(run: Any, tmp_path: Path) -> None:
    found = run("hangs right", case_seconds=0.5)
    assert [case.get("wrong", "") for case in found["cases"]] == [
        *("it did not end within 0.5 s, and its process was ended", "")
    ]
    assert gone(int((tmp_path / "child").read_text()))


def test_a_part_ends_at_its_limit_and_keeps_what_it_has(run: Any, tmp_path: Path) -> None:
    found = run("right hangs right", 4)
    assert (found["ran"], found["wrong"], found["cut_off"]) == (1, 0, ["hangs 1"])
    assert gone(int((tmp_path / "child").read_text()))


def test_a_part_that_cannot_ask_has_failed(run: Any) -> None:
    found = run("broken right")
    (why,) = found["failed"]
    assert why.startswith("a process ended with status 1 outside of its cases: ") and "no such sample" in why
    assert found["ran"] == 0


def test_workers_share_the_cases(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 16)
    found = run("right dies right wrong right", workers=2)
    assert found["workers"] == 2
    assert [case["case"] for case in found["cases"]] == ["right 0", "dies 1", "right 2", "wrong 3", "right 4"]


def test_results_after_every_part_summary_and_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run_part(part: Part, seconds: float, folder: Path, *, rehearse: bool) -> dict[str, Any]:
        file = folder / "first_run.json"
        seen.append(len(json.loads(file.read_text())["parts"]) if file.exists() else 0)
        cases = [{"case": "amax 0: float32[3]", "seconds": 0.1} | wrong for wrong in ({}, {"wrong": "1 of 1 differ"})]
        cases = cases[: 1 + (part.name == "kernels")]
        about = {"part": part.name, "question": part.question, "ran": len(cases), "limit_s": seconds, "seconds": 1.0}
        return about | {"cases": cases, "wrong": len(cases) - 1}

    monkeypatch.setattr(command, "run_part", run_part)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["--out", str(tmp_path / "a"), "device", "kernels", "bits"]) == 1
    assert seen == [0, 1, 2]
    text = (tmp_path / "a/summary.txt").read_text()
    assert text.startswith("1 wrong, in kernels; 4 cases ran\nWRONG kernels: amax 0: float32[3]: 1 of 1 differ\n")
    assert text.strip() in capsys.readouterr().out
    assert command.main(["--out", str(tmp_path / "b"), "device"]) == 0
    written = json.loads((tmp_path / "b/first_run.json").read_text())
    assert written["rehearsal"] is False and written["minutes"] == 8 and not list((tmp_path / "b").glob(".*"))


def test_what_does_not_fit_is_skipped_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {}

    def run_part(part: Part, seconds: float, folder: Path, *, rehearse: bool) -> dict[str, Any]:
        limits[part.name] = seconds
        return {"part": part.name, "question": part.question, "ran": 0, "limit_s": seconds, "seconds": 0.0, "wrong": 0}

    monkeypatch.setattr(command, "run_part", run_part)
    assert command.main(["--rehearse", "--minutes", "1", "--out", str(tmp_path)]) == 0
    # what a part leaves of its share goes to those after it, and one that does not fit leaves its own
    assert [*limits] == ["kernels", "modules", "compiled", "training", "speed", "graphs"]
    assert limits["kernels"] == pytest.approx(60 * 110 / 460, rel=0.01) and limits["graphs"] == pytest.approx(
        60, rel=0.1
    )
    said = "not run: device (device, versions, and which peers can be imported): its share of what is left is 2 s"
    assert said in capsys.readouterr().out


def test_parts_are_those_of_the_package() -> None:
    assert [part.name for part in PARTS] == [
        *("device", "kernels", "bits", "modules", "compiled", "training", "speed", "graphs")
    ]
    assert sum(part.seconds for part in PARTS) == 480


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip() == command.NO_DEVICE and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as error:
        command.main(["kernel"])
    assert error.value.code == 2
    assert "there is no part 'kernel'; allowed: device, kernels, bits" in capsys.readouterr().err


def test_many_wrong_cases_are_counted_in_words() -> None:
    cases = [{"case": f"c{n}", "wrong": "w"} for n in range(45)]
    found = [{"part": "p", "question": "q", "ran": 45, "limit_s": 9.0, "seconds": 1.0, "wrong": 45, "cases": cases}]
    lines = in_words(found).splitlines()
    assert lines[0] == "45 wrong, in p; 45 cases ran" and lines[40] == "WRONG p: c39: w"
    assert lines[41] == "WRONG p: 5 more cases, in p.json"


@pytest.mark.parametrize("in_turn", [True, False])
def test_tiles_are_not_timed(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    monkeypatch.setattr(autotuner.Autotuner, "run", autotuner.Autotuner.run)  # as it was at the end
    untimed_tiles(in_turn=in_turn)
    launched: list[tuple[Any, ...]] = []
    configs = [autotuner.Config({"TILE": n}, num_warps=4) for n in (16, 32)]
    tuner = SimpleNamespace(
        arg_names=["x", "n"],
        prune_configs=lambda named: configs if named["grid"] == (1,) else [],
        fn=SimpleNamespace(run=lambda *given, **named: launched.append((given, named["TILE"], named["num_warps"]))),
    )
    for _ in range(4):
        autotuner.Autotuner.run(tuner, "x", 3, grid=(1,), warmup=False)
    assert [tile for _, tile, _ in launched] == ([32, 16, 32, 16] if in_turn else [16] * 4)
    assert launched[0][0] == ("x", 3) and tuner.nargs == {"x": "x", "n": 3}
