"""Chats as rows of tokens with a loss mask, in the process of `tokenizer_process`: written and tokenized whole.

Which tokens an assistant's message has, their offsets say. A template writes the message behind what it writes for the
chat before it. What it writes behind the answer's last word ends the turn, as does a token behind that at which the
model stops anyway, such as the one that begins the next turn. A template that writes an earlier turn
otherwise when a chat goes on (reasoning that is left out) is served by a row for each answer, as it was asked for.

It imports nothing of the project, for the process that loads it is a script.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

Messages = list[dict[str, Any]]
_MARK = "\ue000answer\ue000"
"""Stands for an answer while its place is looked for: private characters that no template has."""


class ChatError(Exception):
    """A chat that the template does not write; one sentence."""


class ChatRows:
    """The rows of chats. tokenizer: of transformers. ends: tokens at which generation ends. end: a token to write
    behind answers that the template ends with none. final: whether a chat that the template rewrites is one row, as it
    is at the end, in place of a row for each answer that differs."""

    def __init__(self, tokenizer: Any, ends: Collection[int], *, end: str | None = None, final: bool = False) -> None:
        self._tokenizer, self._end, self._final = tokenizer, end, final
        backend = tokenizer.backend_tokenizer
        self._encoder = type(backend).from_str(backend.to_str())
        self._encoder.post_processor = None  # it trims offsets, and adds what the template writes itself
        self._encoder.no_truncation()
        self._encoder.no_padding()
        added = tokenizer.added_tokens_decoder
        self._specials = {token.content: id for id, token in added.items() if token.special}
        names = {id: tokenizer.convert_ids_to_tokens(id) for id in ends if 0 <= id < len(tokenizer)}
        self._ends = {name: id for id, name in names.items() if name}
        self._specials |= self._ends
        self._turn_end: str | None = None
        self._turn_end = self._find_turn_end()

    def turn_ends(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        found = set(self._ends.values())
        return sorted(found if self._turn_end is None else found | {self._specials[self._turn_end]})

    def rows(self, messages: Messages, tools: list[Any] | None = None) -> list[tuple[list[int], list[int], int]]:
        """Return the rows of a chat: ids, for each whether the loss counts it, and how many answers nothing ends."""
        text = _Written(self._tokenizer, messages, tools)
        marked = self._is_marked(tools)
        for i, message in enumerate(messages):
            if isinstance(message.get("content"), list) and str(message["content"]) in text.whole:
                raise ChatError(f"it writes the parts of the content of message {i} as Python does, not their text")
        left = [AssistantMessage(self, text, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
        rows, written = [], text.whole
        if marked and self._final:
            return [self._marked_row(text, written, [a for a in left if messages[a.index].get("weight") != 0])]
        while left:
            here = [found for answer in left if (found := self._found(answer, written, final=not rows)) is not None]
            left = [answer for answer in left if all(answer.index != found.index for found in here)]
            scored = [answer for answer in here if messages[answer.index].get("weight") != 0]
            if scored:
                make = self._marked_row if marked else self._row
                rows.append(make(text, written, scored))
            written = left[-1].answered or "" if left else ""
        return rows

    def _found(self, answer: AssistantMessage, written: str, *, final: bool) -> AssistantMessage | None:
        """Return an answer with its places in a text, which is the final one or ends with an answer; None: the text
        has it in other words."""
        if answer.is_in(written):
            return answer
        if answer.answered is None or (final and self._final):
            return answer.in_final(written)
        return None

    def _row(self, text: _Written, written: str, answers: list[AssistantMessage]) -> tuple[list[int], list[int], int]:
        spans, unended, shift = [], 0, 0
        for answer in answers:
            begin, end = answer.start + shift, answer.end_in(written, shift)
            further = "" if answer.ended else self.end_behind(written, end) or answer.next_end(written)
            if not answer.ended and not further and self._end is not None:
                end, further = answer.content_end + shift, self._end
                written = written[:end] + further + written[end:]
                shift += len(further)
            elif further and not written.startswith(further, end):  # the turn that it begins is not in this row
                written = written[:end] + further
            unended += not (answer.ended or further)
            spans.append((begin, end + len(further)))
        return *self._encode(written, spans), unended

    def _encode(self, written: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        encoded = self._encoder.encode(written, add_special_tokens=False)
        scored, span, spans = [], 0, sorted(spans)
        for begin, end in encoded.offsets:
            while span < len(spans) and begin >= spans[span][1] and begin < end:
                span += 1
            inside = span < len(spans) and begin < spans[span][1] and end > spans[span][0]
            scored.append(int(inside))
        return encoded.ids, scored

    def _marked_row(
        self, text: _Written, written: str, answers: list[AssistantMessage]
    ) -> tuple[list[int], list[int], int]:
        """A row of a template that marks what the assistant writes: as transformers counts it, and the token behind a
        marked part that ends the turn."""
        count = len(text.messages) if written is text.whole else answers[-1].index + 1
        found = text.marked(count)
        ids, marks = list(found["input_ids"]), list(found["assistant_masks"])
        if len(answers) < sum(message["role"] == "assistant" for message in text.messages[:count]):
            _, wanted = self._encode(written, [(a.start, a.end) for a in answers])
            marks = [a & b for a, b in zip(marks, wanted, strict=True)]
        ends, unended = self.turn_ends(), 0
        for i in range(1, len(ids) + 1):
            if marks[i - 1] and (i == len(ids) or not marks[i]):
                closed = any(id in ends for id in ids[max(0, i - 2) : i])
                if not closed and i < len(ids) and ids[i] in ends:
                    marks[i] = 1
                else:
                    unended += not closed
        return ids, marks, unended

    def _is_marked(self, tools: list[Any] | None) -> bool:
        template = self._tokenizer.get_chat_template(None, tools)
        return "{%generation" in template.replace("{%-", "{%").replace("{% ", "{%")

    def end_behind(self, written: str, end: int) -> str:
        """What comes behind a place if it is a token at which the model stops, with the space before it."""
        rest = written[end:]
        spaces = len(rest) - len(rest.lstrip())
        known = [*self._ends, *([] if self._turn_end is None else [self._turn_end])]
        found = [name for name in known if rest.startswith(name, spaces)]
        return rest[:spaces] + max(found, key=len) if found else ""

    def tail(self, text: str, start: int) -> tuple[int, int | None]:
        """Return where what is behind the last word of text[start:] begins, and where the token in it that ends a turn
        ends; None if it does not."""
        end, found = len(text), []
        while True:
            stripped = len(text[start:end].rstrip()) + start
            special = max((s for s in self._specials if text.endswith(s, start, stripped)), key=len, default=None)
            if special is None:
                break
            found.append((special, stripped))
            end = stripped - len(special)
        if not found:
            return stripped, None
        found.reverse()
        known = [place for special, place in found if special in self._ends or special == self._turn_end]
        place = known[0] if known else found[-1][1]
        behind = [special for special, at in found if at <= place]
        return place - len(behind[-1]), place

    def _find_turn_end(self) -> str | None:
        """Return the token that the template writes behind an answer of one word."""
        asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._tokenizer.apply_chat_template(asked, tokenize=False)
        except Exception:  # of templates that ask for more: each answer is looked at by itself
            return None
        behind = text.rpartition(_MARK)[2].lstrip()
        return max((s for s in self._specials if behind.startswith(s)), key=len, default=None)


class _Written:
    """What a template writes for the beginnings of a chat. whole: for all of it."""

    def __init__(self, tokenizer: Any, messages: Messages, tools: list[Any] | None) -> None:
        self._tokenizer, self._tools, self.messages = tokenizer, tools, messages
        self.whole: str = self.of(messages)

    def of(self, messages: Messages, *, prompt: bool = False) -> str:
        """Return the text of messages."""
        options = {"tools": self._tools, "tokenize": False, "add_generation_prompt": prompt}
        text: str = self._tokenizer.apply_chat_template(messages, **options)
        return text

    def if_any(self, messages: Messages, *, prompt: bool = False) -> str | None:
        """As `of`; None where the template refuses such a chat, although nobody asked it for that one."""
        try:
            return self.of(messages, prompt=prompt) if messages else None
        except Exception:  # a template raises what it likes
            return None

    def marked(self, count: int) -> Any:
        """Return ids and marks of the first messages, as transformers counts them."""
        return self._tokenizer.apply_chat_template(
            self.messages[:count], tools=self._tools, return_dict=True, return_assistant_tokens_mask=True
        )


class AssistantMessage:
    """A message of the assistant. answered: the text of the chat up to it; None: the template refuses that. start and
    end: the places of the answer in it, with the token that ends it where `ended`."""

    def __init__(self, rows: ChatRows, text: _Written, index: int) -> None:
        self._rows, self._text, self.index = rows, text, index
        messages = text.messages
        last = index + 1 == len(messages)
        self.answered = text.whole if last else text.if_any(messages[: index + 1])
        if self.answered is None:
            self.start = self.end = self.content_end = 0
            self.ended = False
            return
        asked = text.if_any(messages[:index], prompt=True)
        if asked is not None and self.answered.startswith(asked):
            self.start = len(asked)
        else:
            self.start = self._place(self.answered, messages[: index + 1])[0]
        self._set_end(self.answered)

    def _set_end(self, text: str) -> None:
        self.content_end, end = self._rows.tail(text, self.start)
        self.ended = end is not None
        self.end = len(text) if end is None else end

    def is_in(self, written: str) -> bool:
        """Whether a text has the answer as it was asked for and written."""
        if self.answered is None:
            return False
        end = self.end if self.ended else self.content_end
        return written.startswith(self.answered[:end])

    def end_in(self, written: str, shift: int) -> int:
        """Return where the answer ends in a text that has `shift` more characters before it."""
        space = "" if self.answered is None else self.answered[self.content_end : self.end]
        at = self.content_end + shift
        return at + len(space) if written.startswith(space, at) else at

    def in_final(self, whole: str) -> AssistantMessage:
        """Return this answer with its places in the text of the whole chat."""
        found = object.__new__(AssistantMessage)
        found._rows, found._text, found.index, found.answered = self._rows, self._text, self.index, None
        found.start, found.end = self._place(whole, self._text.messages)
        found.content_end, found.ended = found.end, False
        return found

    def _place(self, written: str, messages: Messages) -> tuple[int, int]:
        """Find the answer in a text: where the text is another one when the answer is."""
        other = [dict(m) if i != self.index else {"role": m["role"], "content": _MARK} for i, m in enumerate(messages)]
        marked = self._text.if_any(other)
        if marked is None or _MARK not in marked:
            raise ChatError(f"it writes message {self.index} where it cannot be found, so no part is the assistant's")
        start = _same(written, marked)
        behind = marked[marked.index(_MARK) + len(_MARK) :]
        return start, len(written) - _same(written[start:][::-1], behind[::-1])

    def next_end(self, written: str) -> str:
        """Return the token that begins the next turn where that is what the model stops at, and it is not in a text
        that ends with this answer."""
        if self.answered != written or self.index + 1 == len(self._text.messages):
            return ""
        plain = [_without_reasoning(message) for message in self._text.messages[: self.index + 2]]
        before, after = self._text.if_any(plain[:-1]), self._text.if_any(plain)
        if before is None or after is None or not after.startswith(before):
            return ""
        return self._rows.end_behind(after, len(before))


def _same(a: str, b: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates write it in earlier turns."""
    found = {k: v for k, v in message.items() if k not in ("reasoning_content", "reasoning", "thinking")}
    content = found.get("content")
    if isinstance(content, str) and "</think>" in content:
        found["content"] = content.rpartition("</think>")[2].lstrip("\n")
    return found
