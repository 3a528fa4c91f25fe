"""A killed conversion goes on where it stopped and gives what an undisturbed one does; another job starts afresh."""

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from te_models.checkpoints import CheckpointError, check_manifest, import_hf, quantize, upcycle
from te_models.checkpoints.write.writer import HashedFile
from te_models.cli.main import main
from tests.checkpoints.hf_cases import HFFolder
from tests.checkpoints.quantized_cases import CASES, make
from tests.fork_server import Python, run_python

SHARD_BYTES = 20_000
CONVERSIONS: dict[str, Callable[[Path, Path], Any]] = {
    "import": lambda source, out: import_hf(source, out, max_shard_bytes=SHARD_BYTES),
    "quantize": lambda source, out: quantize(source, out, "block", max_shard_bytes=SHARD_BYTES),
}


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(convert: Callable[[Path, Path], Any], source: Path, out: Path) -> int:
    """Fork; convert in the child; return its process id."""
    pid = os.fork()
    if pid == 0:
        convert(source, out)
        os._exit(0)
    return pid


def kill_again_and_again(source: Path, work: Path, count: int, seed: int) -> None:
    """Print a list of reports, one for each of `count` kills."""
    rng = random.Random(seed)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("te_models.checkpoints.write.resume").addHandler(handler)
    reports = []
    for number in range(count):
        name = sorted(CONVERSIONS)[number % len(CONVERSIONS)]
        convert = CONVERSIONS[name]
        reference = work / f"reference-{name}"
        if not reference.exists():
            convert(source, reference)
        begun = time.perf_counter()
        os.waitpid(start(convert, source, work / "whole"), 0)
        seconds = time.perf_counter() - begun
        shutil.rmtree(work / "whole")
        out = work / "out"
        pid = start(convert, source, out)
        if number % 4 < 2:
            time.sleep(rng.uniform(0, seconds))
        else:
            finished, latest = work / f".{out.name}.partial" / "finished", time.monotonic() + 30
            while not (out.exists() or list(finished.glob("*.json"))) and time.monotonic() < latest:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, seconds / 4))
        os.kill(pid, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        report: dict[str, Any] = {"conversion": name, "killed": killed, "appeared": out.exists()}
        if out.exists():
            check_manifest(out)
            report["complete"] = content(out) == content(reference)
            shutil.rmtree(out)
        messages.clear()
        convert(source, out)
        report["continued"] = " ".join(messages)
        report["equal"] = content(out) == content(reference)
        shutil.rmtree(out)
        report["left"] = sorted(p.name for p in work.iterdir() if not p.name.startswith("reference-"))
        reports.append(report)
    print(json.dumps(reports))


SHARD_BYTES = 20_000


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments(hf_folder: HFFolder, tmp_path: Path, count: int) -> None:
    source = hf_folder("mixtral")
    (tmp_path / "work").mkdir()
    command = [
        "-m",
        "tests.checkpoints.write.test_resumed_conversion",
        str(source),
        str(tmp_path / "work"),
        str(count),
        "20261121",
    ]
    result = run_python(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    assert len(reports) == count
    for report in reports:
        assert report["complete"] if report["appeared"] else report["killed"], report
        assert report["equal"] and not report["left"], report
    continued = [r for r in reports if r["continued"]]
    assert all(r["continued"].startswith("continuing an interrupted run: ") for r in continued)
    if count == 100:
        assert len(continued) > 20, "the moments were spread over the run"


Convert = Callable[[Path, Path], Any]


def interrupted(convert: Convert, source: Path, out: Path, files: int) -> Path:
    """Fork, convert, die by SIGKILL when exactly `files` files are finished; return the working folder."""
    working = out.parent / f".{out.name}.partial"
    pid = os.fork()
    if pid == 0:
        real, begun = HashedFile.write_header, 0

        def write_header(self: HashedFile, data: bytes) -> None:
            nonlocal begun
            begun += 1
            if begun > files:
                deadline = time.monotonic() + 30
                while len(list(working.glob("finished/*.json"))) < files and time.monotonic() < deadline:
                    time.sleep(0.01)  # another thread still writes one of them
                os.kill(os.getpid(), 9)
            real(self, data)

        HashedFile.write_header = write_header
        try:
            convert(source, out)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]) and not out.exists()
    return working


def do_import(source: Path, out: Path, **options: Any) -> None:
    import_hf(source, out, max_shard_bytes=SHARD_BYTES, **options)


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What conversions say of interrupted ones."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("te_models.checkpoints.write.resume")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def notes(told: list[str]) -> list[str]:
    found = [*told]
    told.clear()
    return found


def test_finished_files_are_kept_and_counted(hf_folder: HFFolder, tmp_path: Path, told: list[str]) -> None:
    source, out = hf_folder("mixtral"), tmp_path / "out"
    do_import(source, tmp_path / "reference")
    working = interrupted(do_import, source, out, files=3)
    finished = {p.stem: (working / "content" / p.stem).stat() for p in (working / "finished").iterdir()}
    assert len(finished) == 3
    seen: list[tuple[int, int]] = []
    do_import(source, out, progress=lambda done, total: seen.append((done, total)))
    (note,) = notes(told)
    shards = len(list(out.glob("*.safetensors")))
    assert note.startswith(f"continuing an interrupted run: 3 of {shards} files (")
    assert content(out) == content(tmp_path / "reference")
    for name, before in finished.items():
        after = (out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "written again"
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not working.exists()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_finished_files_are_kept_whichever_digests_are_wanted(
    hf_folder: HFFolder, tmp_path: Path, told: list[str], whole: bool
) -> None:
    """The run that goes on lists the digests that it is asked for, not those that the killed one was."""
    source, out = hf_folder("mixtral"), tmp_path / "out"
    do_import(source, tmp_path / "reference", file_digests=whole)
    interrupted(lambda a, b: do_import(a, b, file_digests=not whole), source, out, files=3)
    do_import(source, out, file_digests=whole)
    assert notes(told)[0].startswith("continuing an interrupted run: 3 of ")
    assert content(out) == content(tmp_path / "reference")


def test_a_damaged_finished_file_is_written_again(hf_folder: HFFolder, tmp_path: Path, told: list[str]) -> None:
    source, out = hf_folder("mixtral"), tmp_path / "out"
    do_import(source, tmp_path / "reference")
    working = interrupted(do_import, source, out, files=4)
    files = sorted(p.stem for p in (working / "finished").iterdir())
    assert len(files) == 4
    raw = bytearray((working / "content" / files[0]).read_bytes())
    raw[-1] ^= 1
    (working / "content" / files[0]).write_bytes(raw)
    os.truncate(working / "content" / files[1], 10)
    (working / "finished" / f"{files[2]}.json").write_text('{"sha256": "')
    do_import(source, out)
    (note,) = notes(told)
    assert note.startswith("continuing an interrupted run: 1 of ")
    assert content(out) == content(tmp_path / "reference")


def touch(source: Path) -> None:
    file = source / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


OTHER_JOBS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "changed source": (touch, {}),
    "other dtype": (lambda source: None, {"dtype": "float32"}),
    "other layout": (lambda source: None, {"layout": "per-gemm"}),
    "other sharding": (lambda source: None, {"max_shard_bytes": 50_000}),
    "other configuration": (lambda source: (source / "config.json").write_text(_other_config(source)), {}),
}


def _other_config(source: Path) -> str:
    return json.dumps(json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 1e-3})


@pytest.mark.sentinels("other dtype", "changed source")
@pytest.mark.parametrize("case", OTHER_JOBS)
def test_another_job_starts_afresh(hf_folder: HFFolder, tmp_path: Path, told: list[str], case: str) -> None:
    source, out = hf_folder("mixtral"), tmp_path / "out"
    interrupted(do_import, source, out, files=3)
    change, options = OTHER_JOBS[case]
    change(source)
    options = {"max_shard_bytes": SHARD_BYTES} | options
    import_hf(source, out, **options)
    assert not notes(told)
    import_hf(source, tmp_path / "reference", **options)
    assert content(out) == content(tmp_path / "reference")


def test_computed_tensors_are_of_the_same_job_only_with_the_same_numbers(
    llama: Path, tmp_path: Path, told: list[str]
) -> None:
    out = tmp_path / "out"

    def with_seed(seed: int, noise: float) -> Convert:
        options = {"noise_std": noise, "seed": seed, "max_shard_bytes": SHARD_BYTES}
        return lambda source, out: upcycle(llama, out, 4, 2, **options)

    for seed, noise in ((1, 0.1), (0, 0.2)):
        interrupted(with_seed(0, 0.1), llama, out, files=3)
        with_seed(seed, noise)(llama, out)
        assert not notes(told)
        out.rename(tmp_path / f"{seed}")
    for first, second in (("current", "block"), ("block", "current")):
        interrupted(lambda s, o: quantize(s, o, first, max_shard_bytes=8_000), llama, out, files=2)  # noqa: B023
        quantize(llama, out, second, max_shard_bytes=8_000)
        assert not notes(told)
        out.rename(tmp_path / second)
    interrupted(with_seed(0, 0.1), llama, out, files=3)
    with_seed(0, 0.1)(llama, out)
    assert len(notes(told)) == 1


def test_measured_errors_are_those_of_the_whole_run(tmp_path: Path, told: list[str]) -> None:
    """conversion.json has the largest error of all files, also of those that the killed run wrote."""
    source, _ = make(CASES["mxfp4-gpt-oss"], tmp_path)

    def convert(source: Path, out: Path) -> None:
        import_hf(source, out, allow_requantize=True, max_shard_bytes=SHARD_BYTES)

    convert(source, tmp_path / "whole")
    report = json.loads((tmp_path / "whole/conversion.json").read_text())
    assert any(line.get("max_error") for line in report["classes"])
    files = len(list((tmp_path / "whole").glob("*.safetensors")))
    interrupted(convert, source, tmp_path / "out", files=files - 1)
    convert(source, tmp_path / "out")
    assert notes(told) and content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_source_that_changes_meanwhile_is_noticed(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = sorted(tmp_path.rglob("*"))

    def progress(done: int, total: int) -> None:
        if done == total:
            touch(llama)

    with pytest.raises(CheckpointError, match="the source files changed while they were read"):
        import_hf(llama, out, progress=progress)
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_keeps_finished_files(hf_folder: HFFolder, tmp_path: Path, told: list[str]) -> None:
    """A real SIGINT to a real process of the command line, which goes on where another one was killed, says so, and
    begins no third of three files before the signal is sent."""
    source, out = hf_folder("mixtral"), tmp_path / "out"
    working = interrupted(do_import, source, out, files=2)
    code = (
        "import itertools, pathlib, signal, sys, time\n"
        "from te_models.checkpoints.write.writer import HashedFile\n"
        "from te_models.cli.main import main\n"
        "real, begun, sent = HashedFile.write_header, itertools.count(1), pathlib.Path(sys.argv[1])\n"
        "def write_header(self, data):\n"
        "    late = next(begun) > 2\n"
        "    while late and not sent.exists():\n"
        "        time.sleep(0.01)\n"
        "    real(self, data)\n"
        "HashedFile.write_header = write_header\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "sys.exit(main(sys.argv[2:]))\n"
    )
    words = ["import", str(source), str(out), "--max-shard-size", f"{SHARD_BYTES}B"]
    sent = tmp_path / "sent"
    run = Python(["-c", code, str(sent), *words])
    while len(list(working.glob("finished/*.json"))) < 4 and run.process.is_alive():
        time.sleep(0.01)
    os.kill(run.process.pid, signal.SIGINT)
    sent.touch()
    ended = run.finish(timeout=60)
    errors = ended.stderr
    kept = len(list(working.glob("finished/*.json")))
    assert ended.returncode == 130 and kept >= 4 and not out.exists(), errors
    # nobody configured logging there: the note goes to standard error, once
    first, *others, last = errors.splitlines()
    assert first.startswith("continuing an interrupted run: 2 of ") and "continuing" not in " ".join(others), errors
    assert last == f"te-models: interrupted; {working} has {kept} finished files: the same command goes on from there"
    assert "Traceback" not in errors and main(words) == 0
    (note,) = notes(told)
    assert note.startswith(f"continuing an interrupted run: {kept} of ")
    do_import(source, tmp_path / "reference")
    assert content(out) == content(tmp_path / "reference") and not working.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_nothing_useful_is_left(hf_folder: HFFolder, tmp_path: Path, error: type[BaseException]) -> None:
    """Ctrl-C before the first file is finished, and an error whenever it comes."""
    source = hf_folder("mixtral")
    before = sorted(tmp_path.rglob("*"))

    def progress(done: int, total: int) -> None:
        if error is KeyboardInterrupt or done == total:
            raise error("now")

    size = 10**9 if error is KeyboardInterrupt else SHARD_BYTES  # one file
    with pytest.raises(error, match="now"):
        import_hf(source, tmp_path / "new/out", max_shard_bytes=size, progress=progress)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_ordinary_run_says_nothing(hf_folder: HFFolder, tmp_path: Path, told: list[str]) -> None:
    do_import(hf_folder("mixtral"), tmp_path / "out")
    assert not notes(told)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
def test_the_bytes_do_not_depend_on_the_number_of_files_at_once(
    hf_folder: HFFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    source = hf_folder("mixtral")
    do_import(source, tmp_path / "reference")
    monkeypatch.setattr("te_models.checkpoints.write.writer.cores", lambda: at_once)
    monkeypatch.setattr("te_models.checkpoints.write.writer.MAX_FILES_AT_ONCE", 8)
    do_import(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "reference")
    quantize(source, tmp_path / "fp8", "mxfp8", max_shard_bytes=SHARD_BYTES)
    monkeypatch.undo()
    quantize(source, tmp_path / "fp8-reference", "mxfp8", max_shard_bytes=SHARD_BYTES)
    assert content(tmp_path / "fp8") == content(tmp_path / "fp8-reference")


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
