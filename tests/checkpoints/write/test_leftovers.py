"""What an earlier run, or somebody else, left in the working folder beside a destination; and the modes of results."""

import os
import stat
import threading
from pathlib import Path

import pytest

from te_models.checkpoints import import_hf, quantize, relayout


def test_a_pipe_in_place_of_the_job_is_not_waited_for(llama: Path, tmp_path: Path) -> None:
    working = tmp_path / ".ours.partial"
    (working / "content").mkdir(parents=True)
    os.mkfifo(working / "job")
    thread = threading.Thread(target=import_hf, args=(llama, tmp_path / "ours"), daemon=True)
    thread.start()
    thread.join(60)
    waiting = thread.is_alive()
    if waiting:  # let it go, so that the session can end
        os.close(os.open(working / "job", os.O_WRONLY))
        thread.join()
    assert not waiting and (tmp_path / "ours/config.json").is_file()


def test_a_link_in_place_of_the_job_is_not_followed(llama: Path, tmp_path: Path) -> None:
    working = tmp_path / ".ours.partial"
    (working / "content").mkdir(parents=True)
    (working / "job").symlink_to("/dev/zero")
    import_hf(llama, tmp_path / "ours")
    assert (tmp_path / "ours/config.json").is_file()


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_results_have_the_modes_that_the_umask_leaves(llama: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        import_hf(llama, tmp_path / "ours", max_shard_bytes=20_000)
        relayout(tmp_path / "ours", tmp_path / "again", "per-gemm")
        quantize(tmp_path / "ours", tmp_path / "fp8", "block")
    finally:
        os.umask(before)
    for name in ("ours", "again", "fp8"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o777 & ~mask
        for file in (tmp_path / name).iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask, file
