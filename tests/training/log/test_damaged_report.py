"""Whatever the files of a run say, the report of it is written, or one sentence names the file and what is wrong."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from te_models.cli.main import main
from te_models.training import MetricsError, read_metrics
from te_models.training.log.report import write_report
from te_models.training.log.starts import STARTS, read_starts, record_start
from te_models.training.metrics import METRICS
from tests.training.log.test_report import Page, write_run
from tests.training.runs import tiny_run

VALUES: tuple[bytes, ...] = (
    *(b"null", b"true", b"false", b"0", b"-1", b"1.5", b"1e-320", b"5e-324", b"1e308", b"-1e308", b"1e999", b"NaN"),
    *(b"-Infinity", b"9007199254740993", b"1" + b"0" * 400, b"1" + b"0" * 5000, b'"4"', b'""', b'"\\ud800"'),
    *(b'"\\u0000"', b"[]", b"[1]", b"{}", b'{"a": 1}', b'{"a": "x"}', b'{"\\udfff": 1}', b'"</title><script>"'),
    *(b"[" * 600 + b"]" * 600, b'{"a":' * 300 + b"1" + b"}" * 300, b"[" * 100_000),
)
MARK = '"MARK"'


def paths(values: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def with_value(line: str, path: tuple[str, ...], value: bytes | None) -> bytes:
    """A line with another value, which need not be JSON, or without it."""
    values = json.loads(line)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1])
    if value is None:
        return json.dumps(values).encode()
    inner[path[-1]] = "MARK"
    return json.dumps(values).encode().replace(MARK.encode(), value)


def damages(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield what the damage is, the file, and its new content."""
    chance = random.Random(0)
    for name in (METRICS, STARTS):
        data = (folder / name).read_bytes()
        lines = data.decode().splitlines()
        for number in (0, 2, len(lines) - 1) if name == METRICS else (0,):
            keys = list(paths(json.loads(lines[number])))
            for path in keys if name == METRICS else [key for key in keys if len(key) == 1 or key[0] == "environment"]:
                for value in (*VALUES, None):
                    changed = [line.encode() for line in lines]
                    changed[number] = with_value(lines[number], path, value)
                    yield f"{path} {value and value[:20]!r}", name, b"\n".join(changed) + b"\n"
            for value in VALUES:
                yield f"line {number} {value[:20]!r}", name, data.replace(lines[number].encode(), value, 1)
        for _ in range(200):
            place, byte = chance.randrange(len(data)), chance.choice(b'"[]{},:019- \0\x80\xff\\\n\r')
            yield f"byte {place} {byte}", name, data[:place] + bytes([byte]) + data[place + 1 :]
            yield f"cut at {place}", name, data[:place]
        yield "empty", name, b""
        yield "blank lines", name, b"\n\n" + data
        yield "a BOM", name, b"\xef\xbb\xbf" + data
        yield "UTF-16", name, data.decode().encode("utf-16")
        yield "binary", name, bytes(range(256)) * 20 + b"\n"
        yield "Windows", name, data.replace(b"\n", b"\r\n")
        yield "backwards", name, b"\n".join(reversed(data.splitlines())) + b"\n"
        yield "twice", name, data + data
        yield "the other file", name, (folder / (STARTS if name == METRICS else METRICS)).read_bytes()
    for value in (b"1e308", b"-1e308", b"1e99", b"-1e99", b"5e-324", b"1e-99", b"0"):  # in each row alike, and in turn
        for other in (value, b"-1e99", b"1e99", b"1e-320"):
            rows = [b'{"step": %d, "loss": %s, "lr": %s}\n' % (n, (value, other)[n % 2], value) for n in range(1, 200)]
            yield f"losses {value!r} and {other!r}", METRICS, b"".join(rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, [4.0, 3.0, 2.0, 2.0])
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    more = {"tokens_per_second": 1e3, "tflops": 0.1, "mfu": 0.5, "data_s": 0.1, "peak_memory": 10**9, "seconds": 1.0}
    (folder / METRICS).write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    shutil.copytree(folder, folder.with_name("intact"))
    return folder


def assert_told(run: Path, what: str, name: str, content: bytes) -> bool:
    """Whether the damage was refused."""
    before = (run / name).read_bytes()
    (run / name).write_bytes(content)
    try:
        write_report([run, run.with_name("intact")], run / "report.html")
    except MetricsError as error:
        sentence = str(error)
        assert str(run) in sentence and "\n" not in sentence and "\0" not in sentence, (what, sentence)
        assert len(sentence) < 600, (what, sentence)
        return True
    except BaseException as error:
        raise AssertionError(f"{name}, {what}: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        (run / name).write_bytes(before)
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text and not any(f'"{word}"' in text for word in ("nan", "inf")), what
    Page(text)
    return False


def test_damaged_runs_are_told(run: Path) -> None:
    """A part of them; the next test makes all."""
    found = [*damages(run)]
    assert len(found) > 1500
    for what, name, content in found[::25]:
        assert_told(run, what, name, content)


@pytest.mark.slow
def test_all_damaged_runs_are_told(run: Path) -> None:
    assert sum(assert_told(run, *damage) for damage in damages(run)) > 900


def test_other_things_in_the_places_of_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line: exit code 2 and one line."""
    for name in (METRICS, STARTS):
        for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), sparse):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            shutil.copytree(run, tmp_path / "run")
            (tmp_path / "run" / name).unlink()
            make(tmp_path / "run" / name)
            assert main(["report", str(tmp_path / "run")]) == 2
            told = capsys.readouterr().err
            assert told.count("\n") == 1 and str(tmp_path / "run" / name) in told, told
    (tmp_path / "file").write_text("x")
    assert main(["report", str(tmp_path / "file")]) == 2


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def test_what_a_trainer_reads_is_told_as_well(tmp_path: Path) -> None:
    """Before its first step, and not when the loss is drawn at the end."""
    for line in ('{"step": 1, "loss": 1%s}' % ("0" * 400), '{"step": 1, "loss": 1, "lr": "x"}', "[" * 100_000):
        (tmp_path / METRICS).write_text(line + "\n")
        with pytest.raises(MetricsError, match="line 1"):
            read_metrics(tmp_path / METRICS)


def test_a_start_that_a_kill_cut_short_is_written_over(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    record_start(tmp_path, config, 0, "cpu", 1)
    whole = (tmp_path / STARTS).read_bytes()
    (tmp_path / STARTS).write_bytes(whole + whole[:100])
    assert len(read_starts(tmp_path)) == 1
    record_start(tmp_path, config, 2, "cpu", 1)
    assert [start["step"] for start in read_starts(tmp_path)] == [0, 2]
    assert read_starts(tmp_path)[1]["environment"]["ranks"] == 1
