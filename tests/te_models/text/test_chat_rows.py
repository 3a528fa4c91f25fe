"""Chats as rows of tokens: the ids of transformers' `apply_chat_template`, and a loss mask that ends with the turn."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="chat templates are transformers'")

from te_models.chat_rows import ChatError, ChatRows
from te_models.checkpoints.folder.special_tokens import model_tokens
from tests.te_models.text.chats import CHAT, KINDS, TEMPLATES, make_folder

ANSWERS = {
    "chatml": ["very well, thanks<|im_end|>", "the sun shines<|im_end|>"],
    "llama2": ["very well, thanks </s>", "the sun shines </s>"],
    "llama3": ["very well, thanks<|eot_id|>", "the sun shines<|eot_id|>"],
    "mistral": ["very well, thanks</s>", "the sun shines</s>"],
    "gemma": ["very well, thanks<end_of_turn>", "the sun shines<end_of_turn>"],
    "glm": ["very well, thanks<|user|>", "the sun shines"],
    "phi3": ["very well, thanks<|end|>", "the sun shines<|end|>"],
    "without end": ["very well, thanks\n", "the sun shines\n"],
}
"""What the loss counts of `CHAT`, of templates that never rewrite a turn."""


def rows_of(folder: Path, tokenizer: Any, **options: Any) -> ChatRows:
    return ChatRows(tokenizer, model_tokens(folder).ends, **options)


def whole(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return ids


def counted(tokenizer: Any, ids: list[int], scored: list[int]) -> list[str]:
    """The texts of consecutive tokens that the loss counts, without spaces, in small letters."""
    found, before = [], 0
    for id, mark in zip(ids, scored, strict=True):
        if mark and not before:
            found.append([])
        if mark:
            found[-1].append(id)
        before = mark
    return [plain(tokenizer.decode(part)) for part in found]


def plain(text: str) -> str:
    """A text without what kinds of tokenizers do not keep."""
    return "".join(text.replace("▁", " ").replace("##", "").lower().split())


@pytest.mark.sentinels(
    "chatml-byte-level", "llama2-legacy prepend", "gemma-metaspace", "glm-unigram", "phi3-word piece"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ANSWERS)
def test_ids_and_masks_of_every_style_and_kind(style: str, kind: str, tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, kind, style)
    ((ids, scored, unended),) = rows_of(tmp_path, tokenizer).rows(CHAT)
    assert ids == whole(tokenizer, CHAT)
    assert counted(tokenizer, ids, scored) == [plain(answer) for answer in ANSWERS[style]]
    assert unended == {"glm": 1, "without end": 2}.get(style, 0)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_template_that_leaves_reasoning_out_has_a_row_for_each_answer(kind: str, tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, kind, "qwen3")
    chat = [dict(m) for m in CHAT]
    chat[1]["reasoning_content"] = "be nice"
    chat[3]["content"] = "<think>\nit is spring\n</think>\n\nthe sun shines"
    last, first = rows_of(tmp_path, tokenizer).rows(chat)
    assert (last[0], first[0]) == (whole(tokenizer, chat), whole(tokenizer, chat[:2]))
    assert counted(tokenizer, *last[:2]) == [plain("<think>it is spring</think>the sun shines<|im_end|>")]
    assert counted(tokenizer, *first[:2]) == [plain("<think>be nice</think>very well, thanks<|im_end|>")]
    ((ids, scored, unended),) = rows_of(tmp_path, tokenizer, final=True).rows(chat)
    assert ids == whole(tokenizer, chat) and not unended
    assert counted(tokenizer, ids, scored) == [
        plain("very well, thanks<|im_end|>"),
        plain("<think>it is spring</think>the sun shines<|im_end|>"),
    ]


def test_answers_of_one_turn_share_a_row(tmp_path: Path) -> None:
    """Calls of tools, whose reasoning stays until the user speaks again."""
    tokenizer = make_folder(tmp_path, "byte-level", "qwen3")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turn = [
        {"role": "user", "content": "how is Oslo"},
        {"role": "assistant", "reasoning_content": "ask", "tool_calls": [call]},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "reasoning_content": "warm", "content": "very well"},
    ]
    ((ids, scored, unended),) = rows_of(tmp_path, tokenizer).rows(turn)
    assert ids == whole(tokenizer, turn) and not unended
    called = '<think>ask</think><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
    assert counted(tokenizer, ids, scored) == [plain(called), plain("<think>warm</think>very well<|im_end|>")]
    longer = [*turn, *CHAT[2:]]
    last, first = rows_of(tmp_path, tokenizer).rows(longer)
    assert (last[0], first[0]) == (whole(tokenizer, longer), ids)
    assert counted(tokenizer, *last[:2]) == [plain("<think></think>the sun shines<|im_end|>")]
    assert first[1] == scored


def test_a_prompt_that_begins_an_answer_otherwise(tmp_path: Path) -> None:
    """DeepSeek's prompt opens the reasoning that the template then leaves out."""
    tokenizer = make_folder(tmp_path, "byte-level", "deepseek")
    chat = [dict(m) for m in CHAT]
    chat[3]["content"] = "<think>\nspring\n</think>the sun shines"
    ((ids, scored, unended),) = rows_of(tmp_path, tokenizer).rows(chat)
    assert ids == whole(tokenizer, chat) and not unended
    assert counted(tokenizer, ids, scored) == [plain("very well, thanks</s>"), plain("the sun shines</s>")]


def test_an_end_that_only_the_last_turn_has_ends_every_answer(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, "metaspace", "at the end")
    last, first = rows_of(tmp_path, tokenizer).rows(CHAT)
    assert (last[0], first[0]) == (whole(tokenizer, CHAT), whole(tokenizer, CHAT[:2]))
    assert counted(tokenizer, *last[:2]) == [plain("the sun shines</s>")]
    assert counted(tokenizer, *first[:2]) == [plain("very well, thanks</s>")]


def test_an_end_is_added_where_there_is_none(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, "legacy prepend", "without end")
    ((ids, scored, unended),) = rows_of(tmp_path, tokenizer, end="</s>").rows(CHAT)
    assert not unended
    assert counted(tokenizer, ids, scored) == [plain("very well, thanks</s>"), plain("the sun shines</s>")]
    assert plain(tokenizer.decode(ids)).startswith(
        plain("user: how are you today assistant: very well, thanks</s>user:")
    )
    complete = make_folder(tmp_path, "byte-level", "chatml")
    assert rows_of(tmp_path, complete, end="</s>").rows(CHAT) == rows_of(tmp_path, complete).rows(CHAT)


def test_the_token_that_begins_the_next_turn_ends_a_row_that_stops_before_it(tmp_path: Path) -> None:
    """A template as GLM's that also leaves out reasoning of earlier turns."""
    tokenizer = make_folder(tmp_path, "byte-level", "glm")
    tokenizer.chat_template = TEMPLATES["glm"][0].replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    )
    chat = [dict(m) for m in CHAT]
    chat[1]["content"] = "<think>nice</think>very well"
    last, first = rows_of(tmp_path, tokenizer).rows(chat)
    assert first[0][:-1] == whole(tokenizer, chat[:2])
    assert counted(tokenizer, *first[:2]) == [plain("<think>nice</think>very well<|user|>")]
    assert (first[2], last[2]) == (0, 1)


def test_a_template_that_marks_what_the_assistant_writes(tmp_path: Path) -> None:
    """The marks of transformers, and the token that ends the turn where it comes right behind them."""
    tokenizer = make_folder(tmp_path, "byte-level", "chatml")
    for inside, outside in (("<|im_end|>", "\n"), ("", "<|im_end|>\n")):
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}" + inside + "{% endgeneration %}{% else %}{{ m.content }}" + inside + "{% endif %}"
            + outside + "{% endfor %}"
        )  # fmt: skip
        ((ids, scored, unended),) = rows_of(tmp_path, tokenizer).rows(CHAT)
        found = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == found["input_ids"] and not unended
        if inside:
            assert scored == found["assistant_masks"]
        assert counted(tokenizer, ids, scored) == [plain(answer) for answer in ANSWERS["chatml"]]


def test_messages_that_weigh_nothing_are_not_counted(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, "byte-level", "chatml")
    chat = [dict(m) for m in CHAT]
    chat[1]["weight"] = 0
    ((ids, scored, _),) = rows_of(tmp_path, tokenizer).rows(chat)
    assert ids == whole(tokenizer, CHAT)
    assert counted(tokenizer, ids, scored) == [plain("the sun shines<|im_end|>")]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, "byte-level", "chatml")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    ((ids, *_),) = rows_of(tmp_path, tokenizer).rows(CHAT, tools)
    assert ids == whole(tokenizer, CHAT, tools=tools) != whole(tokenizer, CHAT)


def test_parts_of_content_that_the_template_does_not_know_are_refused(tmp_path: Path) -> None:
    tokenizer = make_folder(tmp_path, "byte-level", "chatml")
    chat: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CHAT[1]]
    with pytest.raises(ChatError, match="writes the parts of the content of message 0 as Python does"):
        rows_of(tmp_path, tokenizer).rows(chat)
    parts = "{{ m.content | map(attribute='text') | join }}"
    tokenizer.chat_template = TEMPLATES["chatml"][0].replace(
        "{{ m.content or '' }}", "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    )
    ((ids, scored, _),) = rows_of(tmp_path, tokenizer).rows(chat)
    assert ids == whole(tokenizer, chat)
    assert counted(tokenizer, ids, scored) == [plain("very well, thanks<|im_end|>")]
