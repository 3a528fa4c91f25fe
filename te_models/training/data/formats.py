"""What a row of a file is: text, or a chat in one of the formats of the field, turned into messages.

A format names the fields of a row; `fields` says what a file calls them, and `roles` what it calls who speaks. A chat
becomes a list of messages as chat templates read them: `role`, and `content`: text, a list of parts, or absent beside
`tool_calls`; other keys travel to the template. Nothing is guessed from what a row happens to hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from .errors import DataError, first_names

Format = Literal[
    "text", "messages", "sharegpt", "alpaca", "prompt_completion", "reasoning", "preference", "preference_pairs"
]
FORMATS: dict[str, dict[str, str]] = {
    "text": {"text": "text"},
    "messages": {"messages": "messages", "tools": "tools", "role": "role", "content": "content"},
    "sharegpt": {
        "messages": "conversations",
        "system": "system",
        "tools": "tools",
        "role": "from",
        "content": "value",
    },
    "alpaca": {
        "instruction": "instruction",
        "input": "input",
        "output": "output",
        "system": "system",
        "history": "history",
    },
    "prompt_completion": {"prompt": "prompt", "completion": "completion", "tools": "tools"},
    "reasoning": {"prompt": "prompt", "reasoning": "reasoning", "answer": "answer", "system": "system"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "tools": "tools"},
    "preference_pairs": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "tools": "tools"},
}
"""The fields of each format, and what files call them as a rule."""
assert set(FORMATS) == set(get_args(Format))
_OPTIONAL = frozenset(("tools", "system", "history", "input", "rejected"))
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""Who speaks, as files in the format sharegpt say it."""
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


class RowError(DataError):
    """A row that cannot be used, named by file and line; others can be."""


@dataclass(frozen=True)
class Document:
    """One document. where: what errors call it. pieces: its text; messages: of a chat, in place of text, with the tools
    that it may call; scored: of a document of pieces, whether the loss counts each of them (None: all); rejected: of a
    preference pair, whose chosen answer this is, the other one."""

    where: str
    pieces: Iterator[str] | tuple[str, ...] = ()
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    scored: tuple[int, ...] | None = None
    rejected: Document | None = None


@dataclass(frozen=True)
class Fields:
    """How rows are read. names: what the file calls fields of the format; roles: what it calls who speaks; join_parts:
    whether content in parts of text is joined, for templates that write text alone."""

    format: Format = "text"
    names: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    join_parts: bool = False

    def __post_init__(self) -> None:
        known = FORMATS[self.format]
        for name in self.names:
            if name not in known:
                raise DataError(f"{name!r} is no field of the format {self.format}; allowed: {', '.join(known)}")
        if self.roles and self.format in ("text", "alpaca", "reasoning"):
            raise DataError(f"roles are given for the format {self.format}, which has none; allowed: with messages")

    @property
    def is_chat(self) -> bool:
        """Whether rows are chats or answers, of which the loss counts a part."""
        return self.format != "text"

    def name(self, part: str) -> str:
        """Return what the file calls a field of the format."""
        return self.names.get(part, FORMATS[self.format][part])

    def columns(self) -> dict[str, bool]:
        """Return the columns of a row that are read, and whether each has to be there."""
        parts = [part for part in FORMATS[self.format] if part not in ("role", "content")]
        needless = {"preference": {*_OPTIONAL, "prompt"}, "preference_pairs": {"prompt", "tools"}}.get(
            self.format, _OPTIONAL
        )
        return {self.name(part): part not in needless for part in parts}

    def check_columns(self, where: str, found: list[str], what: str = "column") -> None:
        """Raise RowError where a field that has to be there is not."""
        for name, needed in self.columns().items():
            if needed and name not in found:
                hint = ""
                if self.is_chat:
                    hint = f"; fields of the format {self.format} that have other names here: data.fields or --field"
                raise RowError(f"{where} has no {what} {name!r}; it has {first_names(found)}{hint}")

    def document(self, where: str, row: Mapping[str, Any]) -> Document:
        """Return the document of a row. Raises RowError for one that cannot be used."""
        self.check_columns(where, list(row), "field")
        _check_text(where, row, self.columns())
        return _READERS[self.format](self, where, row)


def _text(fields: Fields, where: str, row: Mapping[str, Any]) -> Document:
    return Document(where, (_string(where, fields.name("text"), row[fields.name("text")]),))


def _messages(fields: Fields, where: str, row: Mapping[str, Any]) -> Document:
    name = fields.name("messages")
    messages = _chat(fields, where, name, row[name])
    system = row.get(fields.name("system")) if fields.format == "sharegpt" else None
    if system:
        messages = [{"role": "system", "content": _string(where, "system", system)}, *messages]
    return _answered(where, name, messages, _tools(fields, where, row))


def _alpaca(fields: Fields, where: str, row: Mapping[str, Any]) -> Document:
    def text(part: str) -> str:
        value = row.get(fields.name(part))
        return "" if value is None else _string(where, fields.name(part), value, empty=part != "instruction")

    messages = [{"role": "system", "content": text("system")}] if text("system") else []
    history = row.get(fields.name("history")) or []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(t, str) for t in turn)):
            raise RowError(f"{where}: history has {str(turn)[:80]!r}; allowed: pairs of an instruction and its output")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1], "weight": 0}]
    asked = "\n".join(part for part in (text("instruction"), text("input")) if part)
    answer = _string(where, fields.name("output"), row[fields.name("output")])
    return Document(where, messages=[*messages, _user(asked), {"role": "assistant", "content": answer}])


def _reasoning(fields: Fields, where: str, row: Mapping[str, Any]) -> Document:
    """A question, the reasoning between marks that templates and readers of published models know, and the answer."""

    def text(part: str) -> str:
        return _string(where, fields.name(part), row[fields.name(part)])

    system = row.get(fields.name("system"))
    messages = [{"role": "system", "content": _string(where, fields.name("system"), system)}] if system else []
    answer = f"<think>\n{text('reasoning').strip()}\n</think>\n\n{text('answer')}"
    return Document(where, messages=[*messages, _user(text("prompt")), {"role": "assistant", "content": answer}])


def _prompt_completion(fields: Fields, where: str, row: Mapping[str, Any]) -> Document:
    return _pair(fields, where, row, "completion")


def _preference(fields: Fields, where: str, row: Mapping[str, Any], part: str = "chosen") -> Document:
    """Of a pair, the chosen answer, or the other; without a prompt, both are whole chats."""
    if row.get(fields.name("prompt")) is not None:
        return _pair(fields, where, row, part)
    name = fields.name(part)
    messages = _chat(fields, where, name, row[name])
    for message in messages[:-1]:
        if message["role"] == "assistant":
            message["weight"] = 0  # what both answers come after
    return _answered(where, name, messages, _tools(fields, where, row))


def _preference_pair(fields: Fields, where: str, row: Mapping[str, Any]) -> Document:
    return replace(_preference(fields, where, row), rejected=_preference(fields, where, row, "rejected"))


def _pair(fields: Fields, where: str, row: Mapping[str, Any], part: str) -> Document:
    """A prompt and its answer: texts, written one after the other, or messages."""
    names = fields.name("prompt"), fields.name(part)
    prompt, answer = (row[name] for name in names)
    if isinstance(prompt, str) and isinstance(answer, str):
        texts = (_string(where, names[0], prompt), _string(where, names[1], answer))
        return Document(where, texts, scored=(0, 1))
    if isinstance(prompt, str) or isinstance(answer, str):
        raise RowError(f"{where}: one of {names[0]} and {names[1]} is text; allowed: both texts, or both messages")
    before = _chat(fields, where, names[0], prompt)
    for message in before:
        if message["role"] == "assistant":
            message["weight"] = 0
    after = _chat(fields, where, names[1], answer)
    return _answered(where, names[1], [*before, *after], _tools(fields, where, row))


_READERS = {
    "text": _text,
    "messages": _messages,
    "sharegpt": _messages,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "reasoning": _reasoning,
    "preference": _preference,
    "preference_pairs": _preference_pair,
}


def _chat(fields: Fields, where: str, name: str, value: Any) -> list[dict[str, Any]]:
    """Return the messages of a field, with the keys and roles of templates."""
    if not isinstance(value, list) or not value:
        what = "empty" if value == [] else f"a {type(value).__name__}"
        raise RowError(f"{where}: {name} is {what}; allowed: a list of messages")
    return [_message(fields, f"{where}: {name}[{i}]", message) for i, message in enumerate(value)]


def _message(fields: Fields, where: str, message: Any) -> dict[str, Any]:
    known = FORMATS[fields.format]
    role_key, content_key = (fields.name(k) if k in known else k for k in ("role", "content"))
    if not isinstance(message, dict) or not isinstance(message.get(role_key), str):
        hint = ' (data.format = "sharegpt")' if isinstance(message, dict) and "from" in message else ""
        raise RowError(f"{where} is {str(message)[:80]!r}; allowed: {role_key} and {content_key}, both text{hint}")
    written = {key: value for key, value in message.items() if value is not None and key not in (role_key, content_key)}
    role, content = message[role_key], message.get(content_key)
    roles = {**(_ROLES if fields.format == "sharegpt" else {}), **fields.roles}
    role = roles.get(role, role)
    if fields.format == "sharegpt" and role not in _KNOWN_ROLES:
        names = ", ".join([*_ROLES, *_KNOWN_ROLES])
        raise RowError(f"{where} is of {role!r}; allowed: {names}, and what data.roles or --role translate to these")
    written = {"role": role} | ({} if content is None else {"content": content}) | written
    if isinstance(content, list):
        written["content"] = _parts(fields, where, content)
    elif content is None:
        if not any(written.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking")):
            raise RowError(f"{where} has no {content_key}; allowed: text, or tool_calls in place of it")
    elif not isinstance(content, str):
        raise RowError(f"{where}: {content_key} is a {type(content).__name__}; allowed: text, or a list of parts")
    weight = written.get("weight", 1)
    if weight not in (0, 1):
        raise RowError(f"{where}: weight is {weight!r}; allowed: 0 and 1")
    return written


def _parts(fields: Fields, where: str, parts: list[Any]) -> Any:
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise RowError(f"{where} has the part {str(part)[:80]!r}; allowed: parts of the type text")
    if fields.join_parts:
        return "".join(part["text"] for part in parts)
    return [{key: value for key, value in part.items() if value is not None} for part in parts]


def _answered(where: str, name: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> Document:
    if all(message["role"] != "assistant" or message.get("weight") == 0 for message in messages):
        roles = first_names(dict.fromkeys(message["role"] for message in messages))
        raise RowError(
            f"{where}: {name} has no message of the assistant, so nothing of it would be learned; its roles are {roles}"
        )
    return Document(where, messages=messages, tools=tools)


def _tools(fields: Fields, where: str, row: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a row: a list, or JSON text of one, as tables hold it."""
    tools = row.get(fields.name("tools"))
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            tools = "text"
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"{where}: {fields.name('tools')} is no list of tools; allowed: a list of objects, or JSON of one"
        )
    return tools


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _string(where: str, name: str, value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise RowError(f"{where}: {name} is a {type(value).__name__}; allowed: text")
    if not value and not empty:
        raise RowError(f"{where}: {name} is empty")
    return value


def _check_text(where: str, row: Mapping[str, Any], columns: Mapping[str, bool]) -> None:
    """Raise RowError for half of a character (a lone surrogate): JSON can write it, and no tokenizer can read it."""
    for name in columns:
        value = row.get(name)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise RowError(f"{where}: {name} has the lone surrogate U+{code:04X}, half of a character") from None
