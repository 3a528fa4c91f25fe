"""The metrics file and the loss plot."""

import json
import os
from pathlib import Path

import pytest

import te_models.training as training
from te_models.extras import MissingExtraError
from te_models.model.flops import training_flops_per_token
from te_models.training import loop, preflight
from te_models.training.log import writers
from te_models.training.metrics import MetricsFile
from te_models.training.progress import Progress, clock_time, fitting_words, row_numbers
from tests.compare import refused
from tests.training.runs import tiny_run


def test_numbers_are_read_back_exactly(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 0.1 + 0.2, "lr": 1e-300}
    with MetricsFile(tmp_path / "m.jsonl", keep_steps=0) as file:
        file.write(row)
        assert training.read_metrics(tmp_path / "m.jsonl") == [row]  # before it is closed


def test_resume_drops_later_steps_and_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo')
    with MetricsFile(path, keep_steps=3) as file:
        file.write({"step": 4, "loss": 0.5})
    assert training.read_metrics(path) == [*rows[:3], {"step": 4, "loss": 0.5}]


def test_a_step_that_raises_leaves_closed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open file that is collected warns, and warnings are errors here; so the file is looked at, too."""
    opened: list[MetricsFile] = []

    class Noted(MetricsFile):
        def __enter__(self) -> MetricsFile:
            opened.append(self)
            return super().__enter__()

    def fail(*_: object, **__: object) -> None:
        raise training.TrainingError("step 1: the loss is nan")

    monkeypatch.setattr(writers, "MetricsFile", Noted)
    monkeypatch.setattr(loop, "train_step", fail)
    refused(lambda: training.train(tiny_run(tmp_path)), "loss is nan", error=training.TrainingError)
    assert [file._file.closed for file in opened] == [True]


def test_a_missing_package_for_the_plot_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str, extra: str, *, feature: str) -> None:
        raise MissingExtraError(f"{feature} needs the extra {extra}")

    config = tiny_run(tmp_path)
    monkeypatch.setattr(preflight, "require", absent)
    with pytest.raises(MissingExtraError, match=r"the loss plot \(log.plot\) needs the extra plot"):
        training.train(config.replace(log=config.log.replace(plot=True)))
    assert not Path(config.output_dir).exists()


def test_a_validation_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the checkpoint of that step, and not as a complaint of JSON."""
    monkeypatch.setattr(loop, "evaluate_model", lambda *_: float("nan"))
    config = tiny_run(tmp_path, evaluation=training.EvaluationConfig(every=4, batches=1))
    refused(lambda: training.train(config), "step 4: the validation loss is nan", error=training.TrainingError)
    assert [folder.name for folder in training.list_checkpoints(Path(config.output_dir))] == ["step-00000002"]


def test_a_run_writes_what_it_measured_and_a_picture(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, steps=4, evaluation=training.EvaluationConfig(every=2, batches=1))
    config = config.replace(log=config.log.replace(plot=True, progress=True, peak_tflops=2.0))
    result = training.train(config)
    rows = training.read_metrics(result.metrics_file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [("validation_loss" in row) for row in rows] == [False, True, False, True]
    assert rows[-1]["loss"] == result.loss and rows[-1]["validation_loss"] == result.validation_loss
    assert [row["tokens"] for row in rows] == [128, 256, 384, 512]
    assert all(row["tokens_per_second"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert all(row["data_s"] > 0 and row["peak_memory"] > 2**20 and "step_s_min" not in row for row in rows)
    flops = training_flops_per_token(config.model.config, config.data.sequence_length)
    for row in rows:
        assert row["tflops"] == pytest.approx(flops * row["tokens_per_second"] / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops"] / 2.0)
    png = (tmp_path / "run" / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    training.plot_loss({"a": result.metrics_file, "b": result.metrics_file}, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes() != png
    (tmp_path / "empty.jsonl").touch()
    training.plot_loss({"nothing yet": tmp_path / "empty.jsonl"}, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"step": 2, "loss": 1.0', b"\xff\xfe", b"[1, 2]", b'{"loss": 1.0}', b'{"step": true, "loss": 1.0}'),
        *(b'{"step": 2, "loss": "low"}', b'{"step": 2, "loss": NaN}', b'{"step": 2, "loss": 1e999}', b"[" * 100_000),
        b"",
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + line + b'\n{"step": 3, "loss": 2.0}\n')
    before = path.read_bytes()
    for read in (training.read_metrics, lambda path: MetricsFile(path, keep_steps=3)):
        with pytest.raises(training.MetricsError, match=r"metrics\.jsonl, line 2 .*; move the file away"):
            read(path)
    assert path.read_bytes() == before


def test_a_pipe_is_no_metrics_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")  # reading it would wait for ever
    refused(lambda: training.read_metrics(tmp_path / "metrics.jsonl"), "is not a file", error=training.MetricsError)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_what_a_run_writes_has_the_mode_of_new_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        training.train(tiny_run(tmp_path, steps=1))
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert any(path.name == "training.safetensors" for path in modes)
    for path, mode in modes.items():
        assert mode == (0o777 if (tmp_path / path).is_dir() else 0o666) & ~umask, path


def test_the_time_left_leaves_the_first_step_out(capsys: pytest.CaptureFixture[str]) -> None:
    """It compiles: 600 s here, and 2 s each of the others."""
    clock = iter([600.0, 602.0, 604.0])
    progress = Progress(1004, shown=True, clock=lambda: next(clock))
    row = {"loss": 2.0, "lr": 1e-3, "grad_norm": None, "tokens_per_second": 1234.0, "tflops": 2.0, "mfu": 0.5}
    for step in (2, 3, 4):  # of a run that continued from step 1
        progress.step({"step": step, **row, "data_s": 0.25, "peak_memory": 3 << 30})
    first, _, last = capsys.readouterr().err.splitlines()
    numbers = "1,234 tokens/s  grad norm not finite  lr 1.00e-03  3.0 GiB  mfu 50.0%  data wait 0.25 s"
    assert first == f"step 2/1004  loss 2.0000  {numbers}"
    assert last == f"step 4/1004  loss 2.0000  eta 33:20  {numbers}"
    assert [clock_time(s) for s in (0.4, 65, 7265, 90065)] == ["0:00", "1:05", "2:01:05", "1d 1:01:05"]


def test_lines_in_a_pipe_are_thinned(capsys: pytest.CaptureFixture[str]) -> None:
    """Every third, those with a validation loss, which has a line of its own, and the last one."""
    row = {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1.0, "tflops": 2.0, "data_s": 4e-5}
    progress = Progress(8, shown=True, every=3)
    for step in range(1, 9):
        validation = {"validation_loss": 1.5, "validation_losses": {"code": 2.5}} if step == 4 else {}
        progress.step({"step": step, **row, "peak_memory": 1 << 30, **validation})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/8" for n in (3, 4, 4, 6, 8)]
    assert lines[2] == "step 4/8  validation loss 1.5000  code 2.5000"
    assert not any("data wait" in line for line in lines)


@pytest.mark.parametrize(("width", "kept"), [(80, 2), (140, 6)])
def test_what_fits_into_the_width_is_shown(width: int, kept: int) -> None:
    row = {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1.0, "tflops": 2.0, "data_s": 1.0}
    numbers = row_numbers({"step": 1, **row, "peak_memory": 1 << 30})
    first = "1000/1000  loss 2.0000  eta 10:00  "
    found = fitting_words(numbers, width - len(first) - 12)
    assert found == numbers[: len(found)] and len(found) >= kept
    assert len(first) + 12 + len("  ".join(found)) <= width
