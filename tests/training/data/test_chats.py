"""Chats in a data set: as transformers writes them, through the process that reads templates; what is said of them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="chat templates are transformers'")

from te_models.cli.main import main
from te_models.training import DataError, DocumentOptions, TokenDataset, build_dataset
from tests.te_models.text.chats import CHAT, make_folder

pytestmark = pytest.mark.usefixtures("shared_tokenizer_process")


def rows(path: Path, *chats: Any, field: str = "messages") -> Path:
    path.write_text("".join(json.dumps({field: chat}) + "\n" for chat in chats))
    return path


def parts(dataset: TokenDataset) -> list[tuple[list[int], list[int]]]:
    """The ids and marks of each document."""
    ids, marks = dataset.tokens.tolist(), dataset.loss_mask.read(0, len(dataset)).tolist()
    return [(ids[a:b], marks[a:b]) for a, b in itertools.pairwise([0, *dataset.document_ends.tolist()])]


def test_rows_of_a_chat_that_the_template_rewrites(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path / "t", "byte-level", "qwen3")
    chat = [dict(m) for m in CHAT]
    chat[1]["reasoning_content"] = "be nice"
    path = rows(tmp_path / "a.jsonl", chat, CHAT[:2])
    whole = [tokenizer.apply_chat_template(c, return_dict=False) for c in (chat, chat[:2], CHAT[:2])]
    found = build_dataset(tmp_path / "d", [path], str(tmp_path / "t"), messages_field="messages")
    assert [ids for ids, _ in parts(found)] == whole
    options = DocumentOptions(format="messages", rewritten_chats="final")
    final = parts(build_dataset(tmp_path / "e", [path], str(tmp_path / "t"), options=options))
    assert [ids for ids, _ in final] == [whole[0], whole[2]]
    assert tokenizer.decode([id for id, mark in zip(*final[0], strict=True) if mark]) == (
        "very well, thanks<|im_end|><think>\n\n</think>\n\nthe sun shines<|im_end|>"
    )


def test_answers_without_an_end_are_said_and_can_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_folder(tmp_path / "t", "byte-level", "without end")
    path = rows(tmp_path / "a.jsonl", CHAT, CHAT[:2])
    with pytest.warns(UserWarning, match=r"ends 3 answers in .* with no token, .*; data.add_eos_token = true"):
        build_dataset(tmp_path / "d", [path], str(tmp_path / "t"), messages_field="messages")
    words = ["tokenize", str(path), "--tokenizer", str(tmp_path / "t"), "--output", str(tmp_path / "e"), "--format"]
    assert main([*words, "messages", "--add-eos-token", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 2
    ids, marks = parts(TokenDataset.open(tmp_path / "e"))[0]
    assert tokenizer.decode([id for id, mark in zip(ids, marks, strict=True) if mark]) == (
        " very well, thanks</s> the sun shines</s>"
    )


def test_refused_chats_are_named_or_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "t", "byte-level", "mistral")
    twice = [CHAT[0], CHAT[0], CHAT[1]]
    path = rows(tmp_path / "a.jsonl", CHAT, twice, CHAT[:2])
    with pytest.raises(DataError, match=r"a.jsonl, line 2: the chat template of .*roles must alternate"):
        build_dataset(tmp_path / "d", [path], str(tmp_path / "t"), messages_field="messages")
    words = ["tokenize", str(path), "--tokenizer", str(tmp_path / "t"), "--output", str(tmp_path / "e")]
    assert main([*words, "--messages-field", "messages", "--skip-bad-rows", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["skipped_rows"] == 1 and result["documents"] == 2
    assert "a.jsonl, line 2: the chat template" in result["first_skipped"][0]


def test_formats_of_the_field_are_written_with_the_template(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path / "t", "byte-level", "chatml")
    talk = [{"from": "human", "value": "how are you"}, {"from": "gpt", "value": "very well"}]
    chat = [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "very well"}]
    expected = tokenizer.apply_chat_template(chat, return_dict=False)
    rows(tmp_path / "a.jsonl", talk, field="conversations")
    (tmp_path / "b.jsonl").write_text(json.dumps({"instruction": "how are you", "output": "very well"}) + "\n")
    content = [{"type": "text", "text": "how are you"}]
    rows(tmp_path / "c.jsonl", [{"role": "user", "content": content}, chat[1]])
    for name, options in (
        ("a", DocumentOptions(format="sharegpt")),
        ("b", DocumentOptions(format="alpaca")),
        ("c", DocumentOptions(format="messages", join_parts=True)),
    ):
        found = build_dataset(tmp_path / f"d{name}", [tmp_path / f"{name}.jsonl"], str(tmp_path / "t"), options=options)
        assert parts(found)[0][0] == expected
    with pytest.raises(DataError, match=r"c.jsonl, line 1: .* parts of .* as Python does, .*; data.join_parts = true"):
        build_dataset(tmp_path / "e", [tmp_path / "c.jsonl"], str(tmp_path / "t"), messages_field="messages")


def test_a_prompt_and_its_completion_are_one_text(tmp_path: Path) -> None:
    """Tokenized together, with the tokens beside a text, of which only the end counts."""
    tokenizer = make_folder(tmp_path / "t", "byte-level", "chatml")
    pair = {"prompt": "how are you today", "completion": " very well"}
    (tmp_path / "a.jsonl").write_text(json.dumps(pair) + "\n")
    options = DocumentOptions(format="prompt_completion", add_bos_token=True)
    ((ids, marks),) = parts(build_dataset(tmp_path / "d", [tmp_path / "a.jsonl"], str(tmp_path / "t"), options=options))
    assert ids == [1, *tokenizer(pair["prompt"] + pair["completion"])["input_ids"], 2]
    assert tokenizer.decode([id for id, mark in zip(ids, marks, strict=True) if mark]) == " very well</s>"
