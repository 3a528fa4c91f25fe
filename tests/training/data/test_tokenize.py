"""Files of any kind become a token data set, by any number of workers and after interruptions; errors name a line."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import pickle
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_models.cli.main import main
from te_models.extras import MissingExtraError
from te_models.training import DataError, TokenDataset, build_dataset
from te_models.training.data import documents, tokenize
from tests.byte_tokenizer import byte_tokenizer

CHAT = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(dataset: TokenDataset) -> list[str]:
    """The documents of a data set over bytes, without their ends."""
    ends = [0, *dataset.document_ends.tolist()]
    ids = dataset.tokens.tolist()
    return [bytes(ids[a : b - 1]).decode() for a, b in itertools.pairwise(ends)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def not_built(folder: Path, source: Any, says: str, **options: Any) -> None:
    with pytest.raises(DataError, match=says):
        build_dataset(folder / "no", [source], "bytes", **options)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of several spans each."""
    monkeypatch.setattr(documents, "SPAN_BYTES", 100)
    return [lines(tmp_path / f"{n}.jsonl", [{"body": f"{n} {i} é"} for i in range(20)]) for n in range(3)]


def test_json_lines_keep_documents_and_workers_change_no_byte(tmp_path: Path, many: list[Path]) -> None:
    one = build_dataset(tmp_path / "one", many, "bytes", text_field="body")
    build_dataset(tmp_path / "four", many, "bytes", text_field="body", workers=4)
    assert files(tmp_path / "one")["tokens.bin"] == files(tmp_path / "four")["tokens.bin"]
    assert files(tmp_path / "one") == files(tmp_path / "four")
    assert sorted(texts(one)) == sorted(f"{n} {i} é" for n in range(3) for i in range(20))
    assert texts(one) != sorted(texts(one)), "spans are shuffled"
    assert one.num_documents == 60


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, many: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are complete are not written again; other arguments begin anew."""
    whole = files(build_dataset(tmp_path / "whole", many, "bytes", text_field="body").path)
    write, written = tokenize.write_part, []

    def interrupted(folder: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(folder.name)
        write(folder, *rest)

    monkeypatch.setattr(tokenize, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"\.out\.parts has 2 of \d+ parts: the same command goes on"):
        build_dataset(tmp_path / "out", many, "bytes", text_field="body")
    assert not (tmp_path / "out").exists()
    (tmp_path / ".out.parts" / "2.partial").mkdir()  # what a kill leaves
    written[:] = ["", "", ""]
    again = build_dataset(tmp_path / "out", many, "bytes", text_field="body")
    assert files(again.path) == whole and not {"0", "1"} & set(written)
    assert not (tmp_path / ".out.parts").exists()
    written[:] = []
    with pytest.raises(KeyboardInterrupt):
        build_dataset(tmp_path / "other", many, "bytes", text_field="body")
    many[0].write_text(many[0].read_text() + '{"body": "more"}\n')
    written[:] = ["", "", ""]
    assert "more" in texts(build_dataset(tmp_path / "other", many, "bytes", text_field="body"))
    assert "0" in written


BAD = {
    "no JSON": ('{"text": "a"', r"a.jsonl, line 2 is not JSON: "),
    "no object": ("[1]", r"a.jsonl, line 2 is a list; allowed: an object of named fields"),
    "no field": ('{"body": "x", "id": 1}', r"a.jsonl, line 2 has no field 'text'; it has body, id"),
    "no text": ('{"text": 7}', r"a.jsonl, line 2: text is a int; allowed: text"),
    "empty": ('{"text": ""}', r"a.jsonl, line 2: text is empty"),
    "half of a character": ('{"text": "x \\ud83d"}', r"a.jsonl, line 2: text has the lone surrogate U\+D83D"),
    "no UTF-8": (b'{"text": "\xff"}', r"a.jsonl, line 2 is not JSON: .*utf-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(case: str, tmp_path: Path) -> None:
    row, says = BAD[case]
    data = row if isinstance(row, bytes) else row.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + data + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=says):
        build_dataset(tmp_path / "d", [tmp_path / "a.jsonl"], "bytes", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_text_that_is_no_utf_8_is_named_by_file_and_line(tmp_path: Path) -> None:
    """Also far behind what is read at once; a file cut inside a character, too."""
    fine, file = "all's well é\r\n".encode(), tmp_path / "a.txt"
    for before, data, says in (
        (b"", "déjà\n".encode("latin-1"), "line 1 is not UTF-8: byte 2 of it is 0xe9; allowed: text in UTF-8, so "),
        (fine * 100_000, b"x\xff", "line 100001 is not UTF-8: byte 2 of it is 0xff"),
        (fine, "é".encode()[:1], "line 2 is not UTF-8: byte 1 of it is 0xc3"),
    ):
        file.write_bytes(before + data)
        with pytest.raises(DataError, match=f"a.txt, {says}"):
            build_dataset(tmp_path / "d", [file], "bytes")
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_lines_are_counted_over_spans(tmp_path: Path, many: list[Path]) -> None:
    many[1].write_text(many[1].read_text().replace('"1 17', '7, "x": "1 17'))
    with pytest.raises(DataError, match=r"1.jsonl, line 18: body is a int"):
        build_dataset(tmp_path / "d", many, "bytes", text_field="body")


def test_tables_are_read_through_the_extra_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for pyarrow and datasets, whose calls these are."""
    table = tmp_path / "a.parquet"
    table.touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").touch()
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(MissingExtraError, match=r"reading .*a.parquet needs .*pip install 'te_models\[data\]'"):
            build_dataset(tmp_path / "d", [table], "bytes")
    rows = [["a", "b"], ["c"]]

    class ParquetFile:
        schema_arrow = SimpleNamespace(names=["id", "text"])
        num_row_groups = 2
        metadata = SimpleNamespace(row_group=lambda i: SimpleNamespace(total_byte_size=9, num_rows=len(rows[i])))

        def __init__(self, path: Path) -> None:
            assert path == table

        def iter_batches(self, row_groups: list[int], columns: list[str]) -> Any:
            assert columns == ["text"]
            if rows[row_groups[0]] == ["damaged"]:
                raise OSError("the page\nis damaged")
            yield SimpleNamespace(column=lambda i: SimpleNamespace(to_pylist=lambda: rows[row_groups[0]]))

    class Saved:
        column_names = ("text",)

        def __len__(self) -> int:
            return 2

        def select_columns(self, names: list[str]) -> Saved:
            return self

        def __getitem__(self, where: slice) -> dict[str, list[str]]:
            return {"text": ["d", "e"][where]}

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=ParquetFile))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda folder: Saved()))
    assert sorted(texts(build_dataset(tmp_path / "d", [table, tmp_path / "saved"], "bytes"))) == list("abcde")
    rows[1] = [""]
    not_built(tmp_path, table, r"a.parquet, row 3: text is empty")
    rows[1] = ["damaged"]
    not_built(tmp_path, table, r"a.parquet, row 3 or one soon after cannot be read: the page is damaged")
    not_built(tmp_path, table, r"a.parquet has no column 'body'; it has id, text", text_field="body")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda folder: {"train": Saved()}))
    not_built(tmp_path, tmp_path / "saved", r"has the splits train; name one of them, as in .*saved/train")


@pytest.mark.filterwarnings("default")  # of what the libraries import
def test_real_tables_are_read(tmp_path: Path) -> None:
    """Files of pyarrow in several row groups, a damaged one, and a saved data set."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra data is not installed")
    datasets = pytest.importorskip("datasets", reason="the extra data is not installed")
    rows = {"id": [1, 2, 3], "text": ["one", "zwei é", "three"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet", row_group_size=2)
    datasets.Dataset(pyarrow.table({"text": ["four", "five"]}), fingerprint="0").save_to_disk(str(tmp_path / "saved"))
    found = build_dataset(tmp_path / "d", [tmp_path / "*.parquet", tmp_path / "saved"], "bytes", workers=2)
    assert sorted(texts(found)) == sorted([*rows["text"], "four", "five"])
    not_built(tmp_path, tmp_path / "a.parquet", r"a.parquet has no column 'body'; it has id, text", text_field="body")
    parquet.write_table(pyarrow.table({"text": ["one", "two", None]}), tmp_path / "b.parquet", row_group_size=2)
    not_built(tmp_path, tmp_path / "b.parquet", r"b.parquet, row 3: text is a NoneType; allowed: text")
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    not_built(tmp_path, tmp_path / "c.parquet", r"c.parquet cannot be read: ")
    damaged = bytearray((tmp_path / "a.parquet").read_bytes())
    where = damaged.index(b"three") - 12
    damaged[where : where + 12] = b"\xff" * 12
    (tmp_path / "d.parquet").write_bytes(damaged)
    not_built(tmp_path, tmp_path / "d.parquet", r"d.parquet, row 3 or one soon after cannot be read: ")


@pytest.mark.filterwarnings("default")  # of what the libraries import
def test_real_data_sets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder: files are shards, a row that cannot be used is named, and the run goes on from there."""
    pytest.importorskip("datasets", reason="the extra data is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "rows"
    folder.mkdir()
    files = [folder / f"{name}.jsonl" for name in "abc"]
    for file in files:
        file.write_text("".join(json.dumps({"text": f"{file.stem} {i}", "id": i}) + "\n" for i in range(3)))
    one, two = (build_dataset(tmp_path / f"d{n}", [f"hf://{folder}"], "bytes", workers=n) for n in (1, 2))
    assert texts(one) == texts(two) and sorted(texts(one)) == sorted(f"{n} {i}" for n in "abc" for i in range(3))
    good = files[1].read_text()
    files[1].write_text(good.replace('"b 1"', '""'))
    not_built(tmp_path, f"hf://{folder}", r"hf://.*rows, shard 1, row 2: text is empty")
    files[1].write_text(good)
    assert texts(build_dataset(tmp_path / "e", [f"hf://{folder}"], "bytes")) == texts(one)
    not_built(tmp_path, f"hf://{folder}", r"hf://.*rows has no column 'body'; it has text, id", text_field="body")
    not_built(tmp_path, f"hf://{folder}:test", r"hf://.*rows:test cannot be read: ")
    not_built(tmp_path, "hf://no such folder", "hf://no such folder cannot be read: ")
    files[1].write_text(good + "{")
    not_built(tmp_path, f"hf://{folder}", r"hf://.*rows, shard 1, row 1 or one soon after cannot be read: ")


@pytest.mark.filterwarnings("default")  # of what the libraries import
def test_a_real_data_set_that_may_unpickle_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpickled, what is in the file would leave a trace: a folder."""
    pytest.importorskip("datasets", reason="the extra data is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, trace = tmp_path / "rows", tmp_path / "unpickled"
    folder.mkdir()

    class Trace:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(trace),)

    data = pickle.dumps(Trace())
    with tarfile.open(folder / "a.tar", "w") as archive:
        member = tarfile.TarInfo("0.pickle")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    not_built(tmp_path, f"hf://{folder}", "is read as webdataset, which may unpickle; allowed: text, JSON, CSV, ")
    assert not trace.exists()


def test_streams_are_read_through_the_extra_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for datasets, whose calls these are."""

    class Streamed:
        column_names = None
        num_shards = 2

        def __init__(self, rows: list[dict[str, str]]) -> None:
            self.rows = rows

        def shard(self, num_shards: int, index: int) -> Streamed:
            return Streamed(self.rows[index::num_shards])

        def __iter__(self) -> Iterator[dict[str, str]]:
            for row in self.rows:
                if row["text"] == "broken":
                    raise RuntimeError("the connection\nwas lost")
                yield row

    asked: list[Any] = []
    letters = list("abc")

    class Builder:
        name = "json"

        def as_streaming_dataset(self, split: str) -> Streamed:
            asked[-1] += (split,)
            return Streamed([{"text": letter} for letter in letters])

    def load_dataset_builder(*names: str | None) -> Builder:
        asked.append(names)
        return Builder()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=load_dataset_builder))
    assert sorted(texts(build_dataset(tmp_path / "d", ["hf://a/b@en:test"], "bytes"))) == list("abc")
    assert asked[0] == ("a/b", "en", "test")
    build_dataset(tmp_path / "e", ["hf://a/b"], "bytes")
    assert asked[-1] == ("a/b", None, "train")
    not_built(tmp_path, "hf://a@b@c", "hf://a@b@c names no data set; allowed: hf://NAME, ")
    letters[2] = "broken"
    not_built(
        tmp_path, "hf://a/b", "hf://a/b, shard 0, row 2 or one soon after cannot be read: the connection was lost"
    )
    letters[0] = "broken"
    not_built(tmp_path, "hf://a/b", "hf://a/b cannot be read: the connection was lost")
    asked.clear()
    for name in ("pandas", "webdataset", "some_module_of_its_own"):
        monkeypatch.setattr(Builder, "name", name)
        not_built(tmp_path, "hf://a/b", f"hf://a/b is read as {name}, which may unpickle; allowed: text, JSON, ")
    assert asked == [("a/b", None)] * 3, "no file was opened"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"reading hf://a/b needs .*pip install 'te_models\[data\]'"):
        build_dataset(tmp_path / "f", ["hf://a/b"], "bytes")


def chat_folder(folder: Path, template: str) -> Path:
    tokenizer = byte_tokenizer(["hello world, this is a chat"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "this is"},
    {"role": "user", "content": "a chat"},
    {"role": "assistant", "content": "world"},
]
MARKED = """{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}\
<end>{% endgeneration %}{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"""


@pytest.mark.usefixtures("shared_tokenizer_process")
@pytest.mark.parametrize("template", [CHAT, MARKED], ids=["prefixes", "marked"])
def test_a_chat_scores_what_the_assistant_wrote(template: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer", template)
    path = lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}])
    dataset = build_dataset(tmp_path / "d", [path], str(folder), messages_field="messages")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = int(dataset.document_ends[0])
    ids, mask = dataset.tokens[:end], dataset.loss_mask.read(0, end).bool()
    whole = "<user>hello<end><assistant>this is<end><user>a chat<end><assistant>world<end>"
    assert tokenizer.decode(ids.tolist()) == whole
    assert tokenizer.decode(ids[mask].tolist()) == "this is<end>world<end>" and dataset.num_documents == 2
    plain = torch.ones(len(dataset), dtype=torch.uint8).numpy().tobytes()
    before = dataset.checked_digest()
    (dataset.path / "loss_mask.bin").write_bytes(plain)
    with pytest.raises(DataError, match=r"loss_mask.bin is not what was built"):
        TokenDataset.open(dataset.path).checked_digest()
    assert before != dataset.digest


@pytest.mark.usefixtures("shared_tokenizer_process")
def test_chats_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer", "{{ raise_exception('roles must alternate') }}")
    cases = [
        ({"messages": []}, "messages is empty; allowed: a list of messages"),
        ({"messages": "hi"}, "messages is a str; allowed"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content; allowed: text, or tool_calls in place of"),
        ({"messages": MESSAGES[:1]}, "messages has no message of the assistant"),
        ({"messages": MESSAGES}, "the chat template of .* cannot be used: .*roles must alternate"),
    ]
    for row, says in cases:
        path = lines(tmp_path / "a.jsonl", [row])
        with pytest.raises(DataError, match=f"a.jsonl, line 1:? {says}"):
            build_dataset(tmp_path / "d", [path], str(folder), messages_field="messages")
    not_built(tmp_path, path, "'bytes' has no chat template", messages_field="messages")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a.txt is text; allowed with a messages field or a format of rows: .jsonl"):
        build_dataset(tmp_path / "d", [tmp_path / "a.txt"], str(folder), messages_field="messages")


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "c"}])
    words = ["tokenize", str(path), "--tokenizer", "bytes", "--output", str(tmp_path / "d")]
    assert main([*words, "--json"]) == 0
    counts = {"tokens": 5, "documents": 2, "vocab_size": 257, "scored_tokens": None}
    assert json.loads(capsys.readouterr().out) == {"output": str(tmp_path / "d"), **counts}
    assert main(words) == 2 and "d exists already" in capsys.readouterr().err
