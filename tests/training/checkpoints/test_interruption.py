"""SIGTERM and Ctrl-C let the step that runs finish, save, and say how to go on. Children get real signals."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_models.signals import SIGNALS, Interrupted, StopSignals
from te_models.training import CheckpointConfig, ScheduleConfig, TrainConfig, latest_checkpoint, list_checkpoints, train
from tests.training.processes import exit_codes, stderr, training, wait_for_rows
from tests.training.runs import curve, tiny_run

FOREVER = 100_000


@pytest.fixture(autouse=True)
def signals_are_not_ignored() -> Iterator[None]:
    """As in a terminal. A shell's background jobs ignore Ctrl-C, and everything they start does."""
    before = {signum: signal.signal(signum, signal.default_int_handler) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def endless(tmp_path: Path, **changes: object) -> TrainConfig:
    """A run that ends only when it is told to, and saves nothing by itself."""
    values = {"steps": FOREVER, "schedule": ScheduleConfig(kind="constant"), "checkpoint": CheckpointConfig()}
    return tiny_run(tmp_path, **(values | changes))


@pytest.mark.sentinels("15-143")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save(tmp_path: Path, signum: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = endless(tmp_path)
    with training(config, tmp_path) as processes:
        wait_for_rows(config, 3, processes)
        before = len(curve(config))
        os.kill(processes[0].pid, signum)
        assert exit_codes(processes) == [code]
    rows, saved = curve(config), latest_checkpoint(Path(config.output_dir))
    assert saved.name == f"step-{len(rows):08d}"
    assert before <= len(rows) <= before + 2  # the step that ran, and one that began before the signal came
    told = stderr(tmp_path).read_text()
    assert f"step {len(rows)} of {FOREVER} is saved in {saved}; continue with: te-models train {tmp_path}" in told

    continued = config.replace(steps=len(rows) + 1)
    train(continued)
    assert f"continuing from step {len(rows)} of {len(rows) + 1}: {saved}" in capsys.readouterr().err
    whole = continued.replace(output_dir=str(tmp_path / "whole"))
    train(whole)
    assert curve(continued) == curve(whole)


def test_a_checkpoint_is_written_by_the_clock(tmp_path: Path) -> None:
    assert CheckpointConfig().every_minutes == 10
    config = endless(tmp_path, steps=3, checkpoint=CheckpointConfig(every_minutes=1e-9, keep_last=0))
    train(config)
    assert [folder.name[-1] for folder in list_checkpoints(Path(config.output_dir))] == ["1", "2", "3"]
    by_steps = config.replace(output_dir=str(tmp_path / "by steps"), checkpoint=CheckpointConfig(every_minutes=0))
    train(by_steps)
    assert [folder.name[-1] for folder in list_checkpoints(Path(by_steps.output_dir))] == ["3"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_noted_while_a_step_runs_and_raise_otherwise(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with StopSignals() as signals:
        with signals.deferred():
            signal.raise_signal(signum)
            assert signals.received == signum
        with pytest.raises(Interrupted) as raised:
            signal.raise_signal(signum)
        assert raised.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr("te_models.signals.time.monotonic", lambda: next(clock))
    with StopSignals() as signals, signals.deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a launcher's repetition
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_an_import_swallowed_is_not_lost() -> None:
    with StopSignals():
        with contextlib.suppress(BaseException):  # as some modules of torch's do
            signal.raise_signal(signal.SIGINT)
        with StopSignals() as inner, pytest.raises(Interrupted), inner.deferred():
            raise AssertionError("no step may begin")


def test_ignored_signals_stay_ignored_and_threads_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # nohup, or a shell's background job
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGINT, before)
    failed: list[BaseException] = []

    def use() -> None:
        try:
            with StopSignals():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not failed
