"""One process at a time: the second is told who works there, and a process that was killed is in nobody's way."""

import errno
import fcntl
import json
import os
import platform
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.atomic import locked_folder, new_folder, replace_text, replaced_file
from te_models.file_lock import HeldError, locked
from tests.fork_server import CONTEXT


def hold(path: Path, told: Connection, forks: bool) -> None:
    """Hold the lock until killed; forks: with a child that outlives this process."""
    with locked(path):
        child = os.fork() if forks else -1
        if child != 0:
            told.send(child)
        time.sleep(120)


def test_a_killed_process_leaves_no_lock_even_where_its_child_lives_on(tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold, args=(tmp_path / "lock", theirs, True))
    process.start()
    child = ours.recv()
    try:
        with pytest.raises(HeldError) as refused, locked(tmp_path / "lock"):
            raise AssertionError("two processes hold it")
        assert refused.value.holder.startswith(f"process {process.pid} on host {platform.node()} (since 20")
        process.kill()
        process.join()
        os.kill(child, 0)
        with locked(tmp_path / "lock") as before:
            assert before is None, "the process was of this host, where the kernel knows"
        assert not (tmp_path / "lock").exists()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        with pytest.raises(HeldError, match=f"process {os.getpid()} on host"), locked(tmp_path / "lock"):
            pass
        assert (tmp_path / "lock").exists(), "the one that was refused removes nothing"
    with locked(tmp_path / "lock"):
        pass


@pytest.mark.parametrize(
    "note", [b"", b"\x80", b"[]", b'{"pid": 1}', b"[" * 4000, b'{"pid":1,"host":"a\\nb","since":""}']
)
def test_whatever_the_file_says_the_kernel_decides(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "lock").write_bytes(note)
    with locked(tmp_path / "lock") as before:
        assert before is None
        (tmp_path / "lock").write_bytes(note)
        with pytest.raises(HeldError, match="another process holds"), locked(tmp_path / "lock"):
            pass


def test_a_process_of_another_host_that_was_killed_is_told(tmp_path: Path) -> None:
    """Locks may not reach other hosts, so the user hears of it; the run begins at once."""
    (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "today"}))
    with locked(tmp_path / "lock") as before:
        assert before == "process 7 on host elsewhere (since today)"


def test_without_locks_the_note_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    file = tmp_path / "lock"
    with locked(file), pytest.raises(HeldError, match=f"process {os.getpid()} .*, or remove {file} if"), locked(file):
        pass
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    file.write_text(json.dumps({"pid": child, "host": platform.node(), "since": "today"}))
    with locked(file):
        pass
    file.write_text(json.dumps({"pid": child, "host": "elsewhere", "since": "today"}))
    with pytest.raises(HeldError, match=r"process \d+ on host elsewhere"), locked(file):
        pass


def test_what_is_no_plain_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    os.link(tmp_path / "mine", tmp_path / "linked")
    (tmp_path / "symbolic").symlink_to("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("linked", "symbolic", "pipe", "folder"):
        with pytest.raises(OSError), locked(tmp_path / name):
            pass
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_working_folder_is_used_by_one_run_and_left_by_nobody(tmp_path: Path) -> None:
    working = tmp_path / ".out.partial"
    with locked_folder(working, tmp_path / "out"):
        (working / "content").mkdir()
        message = f"process {os.getpid()} on host .* is writing {tmp_path}/out; wait for it"
        with pytest.raises(CheckpointError, match=message), new_folder(tmp_path / "out", overwrite=True):
            pass
        assert (working / "content").is_dir()
    with new_folder(tmp_path / "out", overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with replaced_file(tmp_path / "file") as first:
        first.write_text("first")
        replace_text(tmp_path / "file", "second")
        assert (tmp_path / "file").read_text() == "second"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "first")]
