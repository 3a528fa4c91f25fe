"""Two commands on one folder: the second is refused in one sentence, and takes nothing away from the first."""

import os
import platform
from pathlib import Path

import pytest

from te_models.checkpoints.io.atomic import locked_folder
from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.quickstart.main import REPORT, run_quickstart
from te_models.training import CheckpointConfig, ScheduleConfig, build_dataset, latest_checkpoint, train
from te_models.training.one_run import LOCK, alone_in
from tests.training.processes import as_toml, exit_codes, stderr, training, wait_for_rows
from tests.training.runs import TEXT, curve, tiny_run


def test_a_second_trainer_is_refused_and_a_killed_one_is_continued_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of one run are one run."""
    config = tiny_run(tmp_path, steps=100_000, schedule=ScheduleConfig(kind="constant"))
    config = config.replace(checkpoint=CheckpointConfig(every=1, keep_last=1))
    folder = Path(config.output_dir)
    with training(config, tmp_path, ranks=2) as processes:
        wait_for_rows(config, 2, processes)
        alone = config.replace(data=config.data.replace(gradient_accumulation=4))
        (tmp_path / "second.toml").write_text(as_toml(alone))
        assert main(["train", str(tmp_path / "second.toml")]) == 2
        told = capsys.readouterr().err
        who = f"process {processes[0].pid} on host {platform.node()} (since "
        assert told.count("\n") == 1 and f"output_dir is {folder}, where {who}" in told, told
        (tmp_path / "other").mkdir()
        with training(config, tmp_path / "other", ranks=2) as late:
            assert exit_codes(late)[0] == 2 and exit_codes(late)[1] != 0
        assert who in stderr(tmp_path / "other").read_text()
        wait_for_rows(config, len(curve(config)) + 2, processes)
        for process in processes:
            process.kill()
            process.join()
    rows = curve(config)
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1)), "a row is missing"
    assert (folder / LOCK).exists()
    train(alone.replace(steps=int(latest_checkpoint(folder).name[5:]) + 1))
    assert not (folder / LOCK).exists()


def test_a_folder_that_nothing_was_written_to_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume_from"):
        train(tiny_run(tmp_path, "new/run", resume_from=str(tmp_path / "none")))
    assert not (tmp_path / "new").exists()


def test_tokenizing_twice_into_one_folder(tmp_path: Path) -> None:
    """The second must not remove what the first has begun."""
    working = tmp_path / ".data.parts"
    with locked_folder(working, tmp_path / "data"):
        (working / "0.partial").mkdir()
        with pytest.raises(ValueError, match=f"process {os.getpid()} on host .* is writing {tmp_path}/data; wait"):
            build_dataset(tmp_path / "data", [TEXT], "bytes")
        assert (working / "0.partial").is_dir()
    build_dataset(tmp_path / "data", [TEXT], "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_two_quickstarts_into_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    with alone_in(out, "--out"):
        (out / REPORT).write_text("{}")
        (out / "model").mkdir()
        with pytest.raises(ValueError, match=f"--out is {out}, where process {os.getpid()} on host .* works"):
            run_quickstart(out, offline_tiny=True, verbose=False)
        assert (out / "model").is_dir()


def test_the_folder_of_a_run_on_another_host_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.joinpath(LOCK).write_text('{"pid": 5, "host": "far", "since": "2026-01-01 00:00:00 UTC"}')
    with alone_in(tmp_path):
        pass
    told = capsys.readouterr().err
    assert "note: process 5 on host far (since 2026-01-01 00:00:00 UTC) was killed" in told and told.count("\n") == 1
