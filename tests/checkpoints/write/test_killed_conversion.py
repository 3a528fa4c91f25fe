"""Interrupted conversions: nothing half-written under the final name, and the previous result survives."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from te_models.checkpoints import CheckpointError, check_manifest, import_hf, verify
from te_models.checkpoints.io import atomic
from te_models.checkpoints.io.atomic import new_folder
from tests.checkpoints.hf_cases import HFFolder
from tests.fork_server import run_python

# quick: the weights are flushed when written (1); then all five files (2-6), the new folder (7), and its parent after
# the exchange of names (8, 9)
QUICK = [
    ("bytes", 0.0),
    ("bytes", 0.5),
    ("bytes", 1.0),
    ("flush", 1),
    *(("flush", n) for n in (6, 7, 8, 9)),
    ("cleanup", 1),
]
THOROUGH = [*(("bytes", n / 30) for n in range(31)), *(("flush", n) for n in range(1, 24)), ("cleanup", 1)]


def killed_run(source: Path, destination: Path, moment: tuple[str, float], shard_bytes: int) -> bool:
    """Fork, convert, die at the moment; return whether the moment came."""
    pid = os.fork()
    if pid == 0:
        kind, when = moment
        count = 0

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def nth(function):
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count == when:
                    die()
                return function(*args, **kwargs)

            return wrapper

        if kind == "flush":
            os.fsync = nth(os.fsync)
        elif kind == "cleanup":
            shutil.rmtree = nth(shutil.rmtree)

        def progress(done: int, total: int) -> None:
            if kind == "bytes" and done >= when * total:
                die()

        import_hf(source, destination, overwrite=True, max_shard_bytes=shard_bytes, progress=progress)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def state(destination: Path, old: Path, new: Path) -> str:
    """Return which complete folder the destination is: "absent", "old", "new" or "broken"."""
    if not destination.exists():
        return "absent"
    try:
        check_manifest(destination)
        return "old" if verify(destination, old).equal else "new" if verify(destination, new).equal else "broken"
    except CheckpointError as error:
        return f"broken: {error}"


def main(old: Path, new: Path, work: Path, thorough: bool) -> None:
    """Kill imports of `new` over nothing, and over an import of `old`; print a list of reports."""
    moments, shard_bytes = (THOROUGH, 20_000) if thorough else (QUICK, 10**9)
    reports = []
    for existing in (False, True):
        for moment in moments:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            destination = work / "model"
            if existing:
                import_hf(old, destination)
            came = killed_run(new, destination, moment, shard_bytes)
            report = {"moment": moment, "existing": existing, "came": came, "state": state(destination, old, new)}
            report["partial"] = [p.name for p in work.iterdir() if p.name != "model"]
            import_hf(new, destination, overwrite=True)
            report["after"] = state(destination, old, new)
            report["left"] = [p.name for p in work.iterdir() if p.name != "model"]
            reports.append(report)
    print(json.dumps(reports))


@pytest.mark.parametrize("moments", ["quick", pytest.param("thorough", marks=pytest.mark.slow)])
def test_sigkill_at_any_moment(hf_folder: HFFolder, tmp_path: Path, moments: str) -> None:
    old, new = hf_folder("llama"), hf_folder("mistral-full")
    command = [
        "-m",
        "tests.checkpoints.write.test_killed_conversion",
        str(old),
        str(new),
        str(tmp_path / "work"),
        moments,
    ]
    result = run_python(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    for report in reports:
        allowed = {"old", "new"} if report["existing"] else {"absent", "new"}
        assert report["state"] in allowed, report
        if report["moment"][0] == "bytes":
            assert report["came"] and report["state"] == ("old" if report["existing"] else "absent"), report
            assert len(report["partial"]) == 1, report
        if not report["came"]:
            assert report["state"] == "new" and not report["partial"], report
        assert report["after"] == "new" and not report["left"], "the next run works and cleans up"
    came = [r for r in reports if r["came"]]
    assert len(came) >= (80 if moments == "thorough" else 16)
    swapped = [r for r in came if r["existing"] and r["state"] == "new"]
    assert swapped, "one of the moments lies between the exchange of names and the removal of the old folder"


def test_an_exception_leaves_nothing(llama: Path, tmp_path: Path) -> None:

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        import_hf(llama, tmp_path / "new" / "ours", progress=interrupt)
    assert sorted(tmp_path.rglob("*")) == before
    import_hf(llama, tmp_path / "ours")
    manifest = (tmp_path / "ours/manifest.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        import_hf(llama, tmp_path / "ours", dtype="float32", overwrite=True, progress=interrupt)
    assert (tmp_path / "ours/manifest.json").read_bytes() == manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf-llama", "ours"]


def test_existing_destinations(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        import_hf(llama, tmp_path / "file", overwrite=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("x")
    with pytest.raises(CheckpointError, match="choose another destination or pass overwrite"):
        import_hf(llama, tmp_path / "full")
    assert (tmp_path / "full/precious").exists()
    (tmp_path / "link").symlink_to("full")
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        import_hf(llama, tmp_path / "link", overwrite=True)
    (tmp_path / "empty").mkdir()
    import_hf(llama, tmp_path / "empty")
    assert verify(llama, tmp_path / "empty").equal


def test_converting_in_place_replaces_the_source_at_the_end(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("llama")
    import_hf(source, source, overwrite=True)
    assert (source / "manifest.json").exists() and verify(source, hf_folder_copy(hf_folder, tmp_path)).equal


def hf_folder_copy(hf_folder: HFFolder, tmp_path: Path) -> Path:
    (tmp_path / "hf-llama").rename(tmp_path / "converted")
    hf_folder("llama").rename(tmp_path / "fresh")
    (tmp_path / "converted").rename(tmp_path / "hf-llama")
    return tmp_path / "fresh"


def test_a_second_run_to_one_destination_is_refused(llama: Path, tmp_path: Path) -> None:
    with new_folder(tmp_path / "ours", overwrite=False) as first:
        (first / "a").write_text("1")
        with pytest.raises(CheckpointError, match=r"process \d+ on host .* is writing .*ours; wait for it"):
            import_hf(llama, tmp_path / "ours")
        assert (first / "a").read_text() == "1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf-llama", "ours"]
    assert [p.name for p in (tmp_path / "ours").iterdir()] == ["a"]


def test_a_destination_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"), new_folder(tmp_path / "out", overwrite=False):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/precious").write_text("x")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious"]


def test_without_exchange_two_renames_do(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that cannot exchange names in one step still never lose the old folder before the new one is complete."""
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    import_hf(llama, tmp_path / "ours")
    import_hf(llama, tmp_path / "ours", dtype="float32", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf-llama", "ours"]


def test_a_folder_that_was_moved_aside_is_put_back(llama: Path, tmp_path: Path) -> None:
    """Killed between those two renames: the next run, whatever it is, restores the old folder first."""
    for overwrite in (False, True):
        working = tmp_path / ".ours.partial"
        working.mkdir()
        import_hf(llama, working / "old")
        if overwrite:
            import_hf(llama, tmp_path / "ours", dtype="float32", overwrite=True)
            assert not verify(llama, tmp_path / "ours").equal
        else:
            with pytest.raises(CheckpointError, match="exists; choose another destination"):
                import_hf(llama, tmp_path / "ours")
            assert verify(llama, tmp_path / "ours").equal
        assert sorted(p.name for p in tmp_path.iterdir()) == ["hf-llama", "ours"]
        (tmp_path / "ours").rename(tmp_path / "hf-llama" / f"done-{overwrite}")


def test_a_working_folder_of_somebody_else_is_not_used(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ours.partial").mkdir()
    (tmp_path / ".ours.partial/content").write_text("planted")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        import_hf(llama, tmp_path / "ours")
    assert (tmp_path / ".ours.partial/content").read_text() == "planted"
    monkeypatch.undo()
    (tmp_path / ".ours.partial/content").unlink()
    (tmp_path / ".ours.partial/content").symlink_to(llama)
    import_hf(llama, tmp_path / "ours")
    assert verify(llama, tmp_path / "ours").equal and not (tmp_path / "ours").is_symlink()


def test_a_disk_that_is_too_small_is_noticed_first(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs \d+\.\d KiB and its disk has \d+(\.\d KiB| bytes) free"):
        import_hf(llama, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_full_disk_is_reported(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"writing .* failed: No space left on device"):
        import_hf(llama, tmp_path / "ours")
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf-llama"]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), thorough=sys.argv[4] == "thorough")
