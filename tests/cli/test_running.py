"""The verbs that run a model: generate with many prompts, stop strings and chats, and eval."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, generate
from te_models.cli import chat
from te_models.cli import generate as verb
from te_models.cli.codec import open_codec
from te_models.cli.main import main
from te_models.generation.text import TextStream
from tests.byte_tokenizer import byte_tokenizer
from tests.training.runs import tiny_model

CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model over bytes, without tokenizer files."""
    folder = tmp_path_factory.mktemp("model") / "model"
    torch.manual_seed(0)
    GPTModel(tiny_model(), params_dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def words(model: Path) -> list[str]:
    return ["generate", str(model), "--tokenizer", "bytes", "--dtype", "float32", "--max-new-tokens", "8"]


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_many_prompts_continue_as_each_alone(
    model: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["def f(x):", "a", "import json"]
    (tmp_path / "p.txt").write_text("\ufeff" + "\n\n".join(prompts) + "\n\n")  # a mark and empty lines are no prompts
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    out = tmp_path / "out.jsonl"
    result = run_json(capsys, *words, "--prompts", str(tmp_path / "p.txt"), "--batch-size", "2", "--output", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts and result["prompts"] == 3
    gpt = GPTModel.from_pretrained(model, dtype=torch.float32)
    for row in rows:
        ids = torch.tensor([list(row["prompt"].encode())])
        expected = generate(gpt, ids, 8, eos_token_id=256)[0, ids.shape[1] :].tolist()
        assert row["tokens"] == expected and row["finish"] == ("stop" if expected[-1] == 256 else "length")
    assert main([*words, "--prompts", str(tmp_path / "p.jsonl")]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_a_stop_string_ends_the_text_before_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_json(capsys, *words, "--prompt", "x")
    stop = whole["text"][1:2]
    found = run_json(capsys, *words, "--prompt", "x", "--stop", "no such text", "--stop", stop)
    end = whole["text"].index(stop)
    assert found["text"] == whole["text"][:end] and len(found["tokens"]) < len(whole["tokens"])
    assert main([*words, "--prompt", "x", "--stop", stop]) == 0
    assert capsys.readouterr().out == f"x{whole['text'][:end]}\n"


def test_nothing_is_shown_that_may_become_a_stop_string_or_half_a_character() -> None:
    text = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"), stop=["END"], ends=[0])
    assert [text.add(token) for token in "aEé".encode()] == ["a", "", "E", "é"] and not text.finished
    assert [text.add(token) for token in b"ENEND"] == ["", "", "EN", "", ""]
    assert text.finished and text.text + text.rest() == "aEéEN"
    ended = TextStream(lambda ids: bytes(ids).decode(), ends=[0])
    assert [ended.add(token) for token in (97, 0)] == ["a", ""] and ended.finished and ended.tokens == [97, 0]


def test_a_draft_model_and_itself_write_the_same_text(
    model: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run_json(capsys, *words, "--prompt", "def")["tokens"]
    drafted = run_json(capsys, *words, "--prompt", "def", "--draft-model", str(model), "--num-draft-tokens", "3")
    assert drafted["tokens"] == expected


def test_layers_of_further_tokens_as_a_draft_write_the_same_text(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    GPTModel(tiny_model().replace(mtp_num_layers=1), params_dtype=torch.float32).save_pretrained(tmp_path / "mtp")
    own = ["generate", str(tmp_path / "mtp"), *words[2:], "--prompt", "def"]
    assert run_json(capsys, *own, "--draft-mtp")["tokens"] == run_json(capsys, *own)["tokens"]
    assert main([*words, "--prompt", "def", "--draft-mtp"]) != 0
    assert "no layers that predict further tokens" in capsys.readouterr().err


class BytesTemplate:
    """A chat template over bytes, in place of the process that reads a real one."""

    ends = (256,)

    def __init__(self, folder: Path, ends: list[int] | None = None) -> None:
        pass

    def turn_ends(self) -> list[int]:
        return list(self.ends)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return list(("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) + "a:").encode())


def test_a_chat_has_all_turns_before_it(
    model: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = open_codec(model, "bytes", "generate")
    monkeypatch.setattr(verb, "open_codec", lambda *_: dataclasses.replace(codec, folder=model))
    monkeypatch.setattr(chat, "ChatTokenizer", BytesTemplate)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nho\n"))
    messages = run_json(capsys, *words, "--chat", "--max-new-tokens", "3")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    gpt = GPTModel.from_pretrained(model, dtype=torch.float32)
    for turn in (1, 3):
        ids = torch.tensor([BytesTemplate(model).prompt(messages[:turn])])
        new = generate(gpt, ids, 3, eos_token_id=256)[0, ids.shape[1] :].tolist()
        assert messages[turn]["content"] == codec.decode(new)
    second = new[1]
    assert second != new[0]
    monkeypatch.setattr(BytesTemplate, "ends", (second,))  # what the template writes behind an answer ends one
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{m['content']}\n" for m in messages[::2])))
    again = run_json(capsys, *words, "--chat", "--max-new-tokens", "3")["messages"]
    assert codec.decode([second]) not in again[1]["content"] + again[3]["content"]


@pytest.mark.slow
def test_a_chat_answers_each_turn_with_all_turns_before_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer(["def f(x):\n    return x + 1\n"])
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    gpt = GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32)
    gpt.save_pretrained(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "--tokenizer", str(tmp_path), "--chat", "--system", "s"]
    words += ["--dtype", "float32", "--max-new-tokens", "4"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(words) == 2 and "there is no chat template in the folder" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nagain\n"))
    messages = run_json(capsys, *words)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    for turn in (2, 4):
        text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages[:turn]) + "a:"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        new = generate(gpt, ids, 4, eos_token_id=0)[0, ids.shape[1] :].tolist()
        assert messages[turn]["content"] == tokenizer.decode([id for id in new if id])


def test_eval_scores_files_and_all_of_them(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("é" * 50)
    rows = ({"text": "def f(x):"}, {"text": "return x"})
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", str(model), "--tokenizer", "bytes", "--dtype", "float32", "--text", str(tmp_path / "*.*")]
    found = run_json(capsys, *words, "--seq-length", "32", "--stride", "16")["text"]
    a, b = found["files"].values()
    assert (a["tokens"], a["bytes"], a["documents"]) == (100, 100, 1)  # each byte follows the end of a text, or a byte
    assert (b["tokens"], b["bytes"], b["documents"]) == (17, 17, 2)
    mean = (100 * a["nats_per_token"] + 17 * b["nats_per_token"]) / 117
    assert found["all"]["nats_per_token"] == pytest.approx(mean)
    assert found["all"]["bits_per_byte"] == pytest.approx(mean / 0.6931471805599453) and main(words) == 0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["generate", "--prompt", "x", "--stop", ""], "--stop is empty; allowed: text"),
        (["generate", "--prompt", "x", "--system", "s"], "--system needs --chat"),
        (["generate", "--prompt", "x", "--output", "o"], "--output needs --prompts"),
        (["generate", "--prompts", "p", "--draft-model", "d", "--batch-size", "2"], "allowed with --draft-model: 1"),
        (
            ["generate", "--prompt", "x", "--draft-model", "d", "--draft-mtp"],
            "--draft-model and --draft-mtp are both given",
        ),
        (["generate", "--prompt", "x", "--draft-model", "d", "--compile"], "--compile and --draft-model are both"),
        (["generate", "--prompts", "p.jsonl"], "p.jsonl, line 2 has no prompt; allowed: text, or in .jsonl an object"),
        (["generate", "--chat"], "the tokenizer 'bytes' has none"),
        (["eval"], "eval needs --text or --task"),
        (["eval", "--text", "nothing.txt"], "no text file matches 'nothing.txt'"),
        (["eval", "--text", "empty.txt"], "--text has no token to predict"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Path, options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}\n')
    Path("empty.txt").touch()
    name, *rest = options
    assert main([name, str(model), "--tokenizer", "bytes", *rest]) == 2 and says in capsys.readouterr().err
