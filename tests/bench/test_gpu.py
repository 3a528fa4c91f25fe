"""The GPU benchmark where there is no GPU: its refusal, table, JSON and budget, and every call it makes, tiny."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.commit import AT_START
from bench.gpu import __main__ as command
from bench.gpu import quantize, report, timing
from bench.gpu.case import Case, WrongResultError, near, same_bits
from bench.gpu.shapes import H100
from te_models.kernels.gemm import gemm_counts, reset_gemm_counts
from tests.bench.on_triton import TINY, use_triton

CPU = torch.device("cpu")


def one_second(run: Any) -> float:
    return 1.0


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the benchmark's calls to the Triton kernels, under the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton has no build for this platform")
    if torch.cuda.is_available():
        pytest.skip("on a GPU triton does not interpret; there the benchmark itself runs")
    from tests.kernels.triton import interpreter

    interpreter.correct(monkeypatch)
    use_triton(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


def test_without_a_device_it_says_so_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--output", str(tmp_path / "gpu.json")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", command.NO_DEVICE)
    assert err.count(".") == 2  # one sentence, and the name bench.gpu
    assert not list(tmp_path.iterdir())


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["norm"])
    assert error.value.code == 2
    assert "there is no section 'norm'; allowed: quantize, norms, permute" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.usefixtures("on_triton")
@pytest.mark.slow
@pytest.mark.parametrize("section", command.SECTIONS)
def test_every_case_runs(section: str) -> None:
    """Right results from every side, through Triton, and a reason for each peer that is not installed."""
    reset_gemm_counts()
    rows, gaps, _ = command.run([section], CPU, TINY, one_second, timing.Budget(1e6))
    assert [gap for gap in gaps if gap.failed] == []
    missing = {"norms": {"Liger"}, "linear": {"torchao tensorwise", "torchao rowwise"}}.get(section, set())
    absent = {"Liger": "liger_kernel"}
    expected = {"torch scaled_mm"} if section == "scaled" else set()  # it needs a CUDA device
    expected |= {name for name in missing if importlib.util.find_spec(absent.get(name, "torchao")) is None}
    assert {gap.what for gap in gaps} == expected
    counts = {"quantize": 13, "norms": 8, "permute": 5, "scaled": 6, "grouped": 12, "linear": 4}
    assert len(rows) >= counts[section]
    if section == "grouped":
        assert {backend for _, backend in gemm_counts()} == {"triton"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.usefixtures("on_triton")
def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantize.q.amax
    monkeypatch.setattr(quantize.q, "amax", lambda x: right(x) * 2)
    rows, gaps, _ = command.run(["quantize"], CPU, TINY, one_second, timing.Budget(1e6))
    (failed,) = [gap for gap in gaps if gap.failed]
    assert failed.what == "amax"
    assert failed.why == "WrongResultError: ours: 1 of 1 values of result 0 are not the reference's"
    assert "amax" not in {row.case for row in rows}


def test_results_are_compared() -> None:
    ones = torch.ones(4)
    same_bits({"ours": (ones, ones)}, [ones, ones])
    with pytest.raises(WrongResultError, match="ours: 4 of 4 values of result 1"):
        same_bits({"ours": (ones, -ones)}, [ones, ones])
    near({"ours": ones * 1.01, "torch": ones}, "torch", {"ours": 0.02, "absent": 0.0})
    with pytest.raises(WrongResultError, match=r"ours: result 0 is 0\.01 from torch's, relatively; allowed: 0\.001"):
        near({"ours": ones * 1.01, "torch": ones}, "torch", {"ours": 0.001})
    with pytest.raises(WrongResultError, match="is nan from torch's"):
        near({"ours": ones * float("nan"), "torch": ones}, "torch", {"ours": 1.0})


def test_medians_of_sides_in_turn() -> None:
    order: list[str] = []
    times = iter([9.0, 9.0, 0.04, 0.06, *[0.1, 0.5, 0.3, 0.2, 0.2, 0.4] * 5])

    def timer(run: Any) -> float:
        run()
        return next(times)

    found = timing.measure({name: lambda n=name: order.append(n) for name in "ab"}, timer, seconds=1.5)
    assert order == ["a", "b"] * 17  # one to warm up, one to estimate, 1.5 s in rounds of 0.1 s
    assert found == {"a": 0.2, "b": 0.4}


def test_nothing_starts_when_time_is_up() -> None:
    clock = iter([0.0, 60.0, 80.0, 80.0])
    budget = timing.Budget(100, lambda: next(clock))
    assert budget.exhausted(30) is None
    assert budget.exhausted(30) == "80 of 100 seconds are used, and this may take 30"
    late = timing.Budget(0.0, lambda: 7.0)
    rows, gaps, _ = command.run(["permute"], CPU, TINY, one_second, late)
    assert rows == []
    assert gaps == [report.Gap("permute", "3 cases", "0 of 0 seconds are used, and this may take 10")]


CEILINGS = {"copy_bytes_per_s": 3e12, "bf16_flop_per_s": 8e14}


def example() -> list[report.Row]:
    def check(results: dict[str, Any]) -> None: ...

    def run() -> None: ...

    copied = Case("1x128", {"ours": run}, check, nbytes=3 * 10**9, targets={"ours": 0.85})
    sides = {"bf16": run, "torch": run, "FP8": run}
    over = {"bf16": ("torch",), "FP8": ("bf16", "torch")}
    product = Case("fprop", sides, check, flops=8e11, over=over, targets={"FP8": 1.3})
    return [
        *report.rows_of("quantize", copied, {"ours": 1.25e-3}, CEILINGS),
        *report.rows_of("grouped", product, {"bf16": 2e-3, "torch": 1.6e-3, "FP8": 1e-3}, CEILINGS),
    ]


def test_table() -> None:
    assert report.table(example()) == (
        "== quantize\n"
        "case   side      us       rate  of ceiling  speed over  target\n"
        "1x128  ours  1250.0  2400 GB/s         80%                 85%  MISSED\n"
        "\n"
        "== grouped\n"
        "case   side       us         rate  of ceiling  speed over   target\n"
        "fprop  bf16   2000.0  400 TFLOP/s         50%  0.80x torch\n"
        "fprop  torch  1600.0  500 TFLOP/s         62%\n"
        "fprop  FP8    1000.0  800 TFLOP/s        100%  1.60x torch   1.30x  met"
    )


def test_json_has_rows_gaps_and_what_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = [report.Gap("norms", "Liger", "liger-kernel is not installed")]
    about = {"versions": command.software(), "ceilings": CEILINGS}
    found = json.loads(json.dumps(report.payload(example(), gaps, **about)))
    assert [row["side"] for row in found["rows"]] == ["ours", "bf16", "torch", "FP8"]
    assert found["rows"][3]["speed"] == 1.6
    assert (found["rows"][3]["over"], found["rows"][3]["met"]) == ("torch", True)
    assert found["rows"][0]["met"] is False
    assert found["not_measured"] == [
        {"section": "norms", "what": "Liger", "why": "liger-kernel is not installed", "failed": False}
    ]
    assert set(found["versions"]) == {"python", "torch", "cuda", "triton", "liger-kernel", "torchao"}
    assert report.gaps_text(gaps) == "not run: norms: Liger: liger-kernel is not installed"


@pytest.mark.gpu
def test_the_command(tmp_path: Path) -> None:
    """The two quickest sections at full size."""
    file = tmp_path / "gpu.json"
    assert command.main(["permute", "norms", "--seconds", "120", "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {row["section"] for row in found["rows"]} == {"permute", "norms"}
    assert len(H100.norms) * 4 <= sum(row["side"] == "ours" and row["section"] == "norms" for row in found["rows"])
    assert found["ceilings"]["copy_bytes_per_s"] > 1e11 and found["measured_at"] == AT_START
