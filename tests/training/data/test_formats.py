"""Rows in the formats of the field become documents and chats; what cannot be used is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from te_models.cli.main import main
from te_models.training import DataError, DocumentOptions, TokenDataset, build_dataset
from te_models.training.data.formats import Document, Fields, RowError

CALL = {"type": "function", "function": {"name": "sing", "arguments": {"loud": True}}}
SYSTEM = {"role": "system", "content": "be kind"}


def asked(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answered(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def read(format: Any, row: dict[str, Any], **options: Any) -> Document:
    return Fields(format, **options).document("a.jsonl, line 1", row)


U, A = asked("how"), answered("so")
REASONED, UNSCORED = answered("so", reasoning_content="hm", name="x"), answered("so", weight=0)
CHATS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ("messages", {"messages": [U, A]}, [U, A]),
    "content null beside a call": (
        "messages",
        {"messages": [U, {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}]},
        [U, {"role": "assistant", "tool_calls": [CALL]}],
    ),
    "reasoning and other keys": ("messages", {"messages": [U, REASONED]}, [U, REASONED]),
    "sharegpt": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}], "system": "be kind"},
        [SYSTEM, U, A],
    ),
    "alpaca": (
        "alpaca",
        {"instruction": "add", "input": "1 2", "output": "3", "system": "be kind", "history": [["a", "b"]]},
        [SYSTEM, asked("a"), answered("b", weight=0), asked("add\n1 2"), answered("3")],
    ),
    "alpaca without input": (
        "alpaca",
        {"instruction": "sing", "input": "", "output": "la"},
        [asked("sing"), answered("la")],
    ),
    "reasoning traces": (
        "reasoning",
        {"prompt": "how", "reasoning": " hm\n", "answer": "so", "system": "be kind"},
        [SYSTEM, U, answered("<think>\nhm\n</think>\n\nso")],
    ),
    "prompt and completion": ("prompt_completion", {"prompt": [U, A, U], "completion": [A]}, [U, UNSCORED, U, A]),
    "preference with a prompt": ("preference", {"prompt": [U], "chosen": [A], "rejected": [U]}, [U, A]),
    "whole chats": ("preference", {"chosen": [U, A, U, A], "rejected": [U, A]}, [U, UNSCORED, U, A]),
}


@pytest.mark.parametrize("case", CHATS)
def test_a_row_becomes_messages(case: str) -> None:
    format, row, messages = CHATS[case]
    assert read(format, json.loads(json.dumps(row))).messages == messages


def test_names_roles_parts_and_tools() -> None:
    row = {"talk": [{"who": "me", "says": "how"}, {"who": "bot", "says": [{"type": "text", "text": "so"}]}]}
    names = {"messages": "talk", "role": "who", "content": "says"}
    roles = {"me": "user", "bot": "assistant"}
    parts = read("messages", row, names=names, roles=roles)
    assert parts.messages == [U, {**A, "content": [{"type": "text", "text": "so"}]}]
    assert read("messages", row, names=names, roles=roles, join_parts=True).messages == [U, A]
    tools = [{"type": "function", "function": {"name": "sing"}}]
    for value in (tools, json.dumps(tools)):
        assert read("messages", {"messages": [U, A], "tools": value}).tools == tools
    texts = read("prompt_completion", {"prompt": "2 + 2 = ", "completion": "4"})
    assert (texts.pieces, texts.scored) == (("2 + 2 = ", "4"), (0, 1))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sharegpt as messages": ("messages", {"messages": [{"from": "human", "value": "a"}]}, 'data.format = "sharegpt"'),
    "no content": ("messages", {"messages": [U, {"role": "assistant"}]}, r"messages\[1\] has no content; allowed: t"),
    "an image": (
        "messages",
        {"messages": [asked([{"type": "image", "url": "x"}]), A]},
        "allowed: parts of the type te",
    ),
    "a number": ("messages", {"messages": [asked(3), A]}, "content is a int; allowed: text, or"),
    "no answer": ("messages", {"messages": [U]}, "no message of the assistant, .* its roles are user"),
    "only answers that weigh nothing": ("messages", {"messages": [U, {**A, "weight": 0}]}, "no message of the assist"),
    "a weight": ("messages", {"messages": [U, {**A, "weight": 2}]}, "weight is 2; allowed: 0 and 1"),
    "tools": ("messages", {"messages": [U, A], "tools": "{"}, "tools is no list of tools"),
    "a role": ("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "is of 'narrator'; allowed: human"),
    "half of a pair": ("prompt_completion", {"prompt": "a"}, "has no field 'completion'; it has prompt; .* --field"),
    "text and messages": ("prompt_completion", {"prompt": "a", "completion": [A]}, "allowed: both texts, or both mess"),
    "half of a character": ("messages", {"messages": [U, {**A, "content": "x\ud83d"}]}, r"the lone surrogate U\+D83D"),
    "an empty instruction": ("alpaca", {"instruction": "", "output": "x"}, "instruction is empty"),
    "a turn of history": ("alpaca", {"instruction": "a", "output": "x", "history": ["y"]}, "history has 'y'; allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_cannot_be_used_is_one_sentence(case: str) -> None:
    format, row, says = REFUSED[case]
    with pytest.raises(RowError, match=f"a.jsonl, line 1.*{says}"):
        read(format, row)


def test_options_that_do_not_go_together_are_refused() -> None:
    for options, fields, says in (
        ({"fields": ("messages",)}, ("text", None), '"name=name"'),
        ({"fields": ("a=b", "a=c")}, ("text", None), "names 'a' twice"),
        ({"format": "alpaca", "fields": ("prompt=p",)}, ("text", None), "'prompt' is no field of the format alpaca"),
        ({"format": "alpaca"}, ("text", "chat"), "messages_field is given for the format alpaca"),
        ({"format": "alpaca"}, ("body", None), "text_field is given for the format alpaca"),
        ({"roles": ("human=user",)}, ("text", None), "roles are given for the format text"),
    ):
        with pytest.raises(DataError, match=says):
            DocumentOptions(**options).reading(*fields)


def lines(path: Path, *rows: bytes) -> Path:
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


def documents(dataset: TokenDataset) -> list[str]:
    return bytes(id if id < 256 else 10 for id in dataset.tokens.tolist()).decode().splitlines()


def test_empty_lines_and_byte_order_marks_are_no_rows(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    lines(tmp_path / "a.jsonl", mark + b'{"text": "one"}', b"", b'{"text": "two"}\r', b"  ", b"")
    assert documents(build_dataset(tmp_path / "d", [tmp_path / "a.jsonl"], "bytes")) == ["one", "two"]
    (tmp_path / "a.txt").write_bytes(mark + b"text")
    assert documents(build_dataset(tmp_path / "e", [tmp_path / "a.txt"], "bytes")) == ["text"]
    lines(tmp_path / "b.jsonl", b"", mark + b'{"text": "one"}')
    with pytest.raises(DataError, match=r"b.jsonl, line 2 is not JSON"):
        build_dataset(tmp_path / "f", [tmp_path / "b.jsonl"], "bytes")


def test_rows_that_cannot_be_used_are_passed_over_and_counted(tmp_path: Path) -> None:
    bad = (b"{", b"[1]", b'{"body": "x"}', b'{"text": ""}', b'{"text": null}', b'{"text": "\\ud83d"}', b'"\xff"')
    for number, row in enumerate(bad):
        lines(tmp_path / f"{number}.jsonl", b'{"text": "one"}', b"", row, b'{"text": "two"}')
        with pytest.raises(DataError, match=f"{number}.jsonl, line 3"):
            build_dataset(tmp_path / "no", [tmp_path / f"{number}.jsonl"], "bytes")
    options = DocumentOptions(skip_bad_rows=True)
    found = build_dataset(tmp_path / "d", [tmp_path / "*.jsonl"], "bytes", options=options, workers=2)
    assert documents(found) == ["one", "two"] * len(bad)
    source = json.loads((found.path / "meta.json").read_text())["source"]
    assert source["skipped_rows"] == len(bad) and source["options"] == {"skip_bad_rows": True}
    assert len(source["first_skipped"]) == 5 and "line 3" in source["first_skipped"][0]
    lines(tmp_path / "none.jsonl", b"{")
    with pytest.raises(DataError, match=r"hold no token; passed over: 1 row, the first: .*none.jsonl, line 1 is not"):
        build_dataset(tmp_path / "e", [tmp_path / "none.jsonl"], "bytes", options=options)


def test_a_json_file_is_a_list_of_rows_where_rows_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]))
    options = DocumentOptions(format="prompt_completion")
    found = build_dataset(tmp_path / "d", [file], "bytes", options=options)
    assert documents(found) == ["ab", "cd"]
    assert found.loss_mask.read(0, 6).tolist() == [0, 1, 1] * 2
    wrong = {"{}": "holds a dict; allowed: a list of rows", "[": "is not JSON", "[3]": "row 1 is a int"}
    for content, says in wrong.items():
        file.write_text(content)
        with pytest.raises(DataError, match=rf"a\.json,? ?{says}"):
            build_dataset(tmp_path / "e", [file], "bytes", options=options)
    file.write_text("[1]")
    assert documents(build_dataset(tmp_path / "f", [file], "bytes")) == ["[1]"], "text like any other"


def test_that_pairs_are_learned_by_half_is_said_once(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "a", "good": "b", "rejected": "c"}\n' * 2)
    options = DocumentOptions(format="preference", fields=("chosen=good",))
    with pytest.warns(UserWarning, match="fine-tuning on 'good', .* nothing of 'rejected'; \"pref") as told:
        data = build_dataset(tmp_path / "d", [rows], "bytes", options=options)
    assert len(told) == 1 and data.tokens.tolist() == [*b"ab", 256] * 2


@pytest.mark.filterwarnings("default")
def test_the_command_line_notes_what_python_warns_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    words = ["tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--format", "preference", "--json"]
    assert main([*words, "--output", str(tmp_path / "d")]) == 0
    said = capsys.readouterr()
    assert (
        "note: data.format = \"preference\" is supervised fine-tuning on 'chosen'" in said.err
        and "Warning" not in said.err
    )
    assert "on 'chosen'" in json.loads(said.out)["notes"][0]
