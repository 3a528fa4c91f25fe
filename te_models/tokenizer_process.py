"""The process in which a tokenizer's files are read and applied: run as a script, with limits; see `tokenizer`.

It imports nothing of the project, so that it starts in 0.06 s. Requests come on standard input and answers go to what
was standard output, each as a kind (one byte), a length (eight) and so many bytes:

    J  a tokenizer.json       -> its size (JSON)
    F  {"folder", "text"}     -> the ids of the text (uint32) with the folder's tokenizer, as transformers reads it
    C  {"folder", "messages"} -> the ids of a chat (uint32) with its template; highest bit set: the assistant's
    e  UTF-8 text             -> its ids, without special tokens;  E: with them
    d  ids                    -> their UTF-8 text
    t  a token                -> its id (JSON)

Answers are "=" with a result or "!" with a sentence. Beyond the limits on memory and processor time the system ends the
process, and the one that asked says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import struct
import sys
from array import array
from typing import Any, BinaryIO

FRAME = struct.Struct(">cQ")

MAX_RULES = 100
"""Of normalization, splitting, decoding and post-processing together; published tokenizers have up to about 20."""

MAX_GROWTH = 10_000
"""How many times as long the replacements of a normalizer, or of a decoder, may make a text, one after the other."""

TOKENS_PER_BYTE = 16
"""Of a text: one byte is one token at most, but for normal forms (NFKC makes 11 of 3 at most) and what a rule adds."""

TOKENS_BESIDE = 1024
"""What may stand before and behind a text."""

BYTES_PER_TOKEN = 4096
"""Of a token, and of the text that ids mean; published tokenizers have up to 512."""


class LimitError(Exception):
    """A limit that is checked here."""


def main(memory_bytes: int, seconds: int, paths: list[str]) -> None:
    """Answer requests until there are none. seconds: of processor time, for each, and more for long texts."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_DATA, memory_bytes)
    sys.path[:] = paths
    state: dict[str, Any] = {}
    while head := requests.read(FRAME.size):
        kind, length = FRAME.unpack(head)
        data = requests.read(length)
        _allow(seconds + (length >> 14))
        try:
            mark, answer = b"=", _answer(state, kind, data)
        except MemoryError:
            os.abort()  # as the Rust side does
        except LimitError as error:
            mark, answer = b"!", str(error).encode()
        except BaseException as error:  # the Rust side raises bare Exceptions, and a panic is none
            mark, answer = b"!", f"the library refuses it ({_first(error)})".encode(errors="replace")
        _send(answers, mark, answer)


def _answer(state: dict[str, Any], kind: bytes, data: bytes) -> bytes:
    if kind == b"J":
        state["tokenizer"] = tokenizer = _load(data)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        longest = max(map(len, vocabulary), default=0)
        if longest > BYTES_PER_TOKEN:
            raise LimitError(f"has a token of {longest} characters, more than the {BYTES_PER_TOKEN} allowed")
        return json.dumps(max(vocabulary.values(), default=-1) + 1).encode()  # there may be gaps
    if kind == b"F":
        return _of_folder(**json.loads(data))
    if kind == b"C":
        return _of_chat(state, **json.loads(data))
    if kind == b"P":
        return _of_prompt(state, **json.loads(data))
    tokenizer = state["tokenizer"]
    if kind in (b"e", b"E"):
        return _bounded(tokenizer.encode(data.decode(), add_special_tokens=kind == b"E").ids, len(data))
    if kind == b"d":
        text = tokenizer.decode(array("I", data).tolist(), skip_special_tokens=False).encode(errors="replace")
        if len(text) > BYTES_PER_TOKEN * (len(data) // 4):
            raise LimitError(f"makes {len(text)} bytes of text out of {len(data) // 4} tokens")
        return text
    return json.dumps(tokenizer.token_to_id(data.decode())).encode()


def _load(data: bytes) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data.decode())
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor)
    rules = [json.loads(part.__getstate__()) for part in parts if part is not None]
    count, growth, added = sum(map(_count, rules)), max(map(_growth, rules), default=1), sum(map(_added, rules))
    if count > MAX_RULES:
        raise LimitError(f"has {count} rules, more than the {MAX_RULES} allowed")
    if growth > MAX_GROWTH:
        raise LimitError(f"replaces texts by {growth:.0e} times as long ones, more than the {MAX_GROWTH} allowed")
    if added > TOKENS_BESIDE:
        raise LimitError(f"puts {added} tokens beside a text, more than the {TOKENS_BESIDE} allowed")
    # Where texts are cut and to which length they are filled up: settings of the program that wrote the file.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _of_folder(folder: str, text: str) -> bytes:
    return _bounded(_auto_tokenizer(folder)(text)["input_ids"], len(text.encode()))


def _of_chat(state: dict[str, Any], folder: str, messages: list[dict[str, str]]) -> bytes:
    """What the assistant wrote is what the template marks, or what each of its messages adds to the text before it."""
    tokenizer = _chat_tokenizer(state, folder)
    template = tokenizer.chat_template
    if isinstance(template, str) and "{% generation" in template.replace("{%-", "{%"):
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, scored = found["input_ids"], found["assistant_masks"]
    else:
        text, ends = "", []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                options = {"tokenize": False, "add_generation_prompt": True}
                asked = tokenizer.apply_chat_template(messages[:i], **options)
                answered = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
                if not (asked.startswith(text) and answered.startswith(asked)):
                    raise LimitError(f"it changes what is before message {i}, so that no part is the assistant's")
                ends += [(asked[len(text) :], 0), (answered[len(asked) :], 1)]
                text = answered
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if not whole.startswith(text):
            raise LimitError("it changes what is before later messages, so that no part is the assistant's")
        ids, scored = [], []
        for piece, mark in [*ends, (whole[len(text) :], 0)]:
            piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += piece_ids
            scored += [mark] * len(piece_ids)
    return array("I", [id | mark << 31 for id, mark in zip(ids, scored, strict=True)]).tobytes()


def _of_prompt(state: dict[str, Any], folder: str, messages: list[dict[str, str]]) -> bytes:
    tokenizer = _chat_tokenizer(state, folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return array("I", tokenizer(text, add_special_tokens=False)["input_ids"]).tobytes()


def _chat_tokenizer(state: dict[str, Any], folder: str) -> Any:
    if state.get("chat_folder") != folder:
        state["chat_folder"], state["chat"] = folder, _auto_tokenizer(folder)
    if not state["chat"].chat_template:
        raise LimitError("there is no chat template in the folder")
    return state["chat"]


def _auto_tokenizer(folder: str) -> Any:
    # absent, to transformers: no tokenizer needs it, and importing it takes seconds
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import transformers

    transformers.utils.logging.set_verbosity_error()
    options = {"local_files_only": True, "trust_remote_code": False}
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _bounded(ids: list[int], nbytes: int) -> bytes:
    if len(ids) > TOKENS_PER_BYTE * nbytes + TOKENS_BESIDE:
        raise LimitError(f"makes {len(ids)} tokens out of {nbytes} bytes of text")
    return array("I", ids).tobytes()


def _count(rules: Any) -> int:
    """Count what a normalizer, or one of the other parts, does one after the other."""
    if isinstance(rules, dict):
        return sum(map(_count, rules.values())) + isinstance(rules.get("type"), str)
    return sum(map(_count, rules)) if isinstance(rules, list) else 0


def _growth(rules: Any) -> float:
    """Return how many times as long replacements make a text at most, where a pattern matches what is not empty."""
    if isinstance(rules, list):
        return math.prod(map(_growth, rules))
    if not isinstance(rules, dict):
        return 1
    if rules.get("type") != "Replace":
        return _growth(list(rules.values()))
    matched = len(rules["pattern"].get("String", "").encode()) or 1
    return max(1, len(rules["content"].encode()) / matched)


def _added(rules: Any) -> int:
    """Return how many tokens a post-processor puts beside a text, or a pair of them."""
    if isinstance(rules, list):
        return sum(map(_added, rules))
    if not isinstance(rules, dict):
        return 0
    if rules.get("type") != "TemplateProcessing":
        return _added(list(rules.values()))
    sizes = {name: len(token["ids"]) for name, token in rules["special_tokens"].items()}
    pieces = [piece for template in ("single", "pair") for piece in rules[template]]
    return sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in pieces if "SpecialToken" in piece)


def _allow(seconds: int) -> None:
    """End this process after so many more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _lower(which: int, value: int) -> None:
    """Set a soft limit, or leave the hard one if that is lower."""
    hard = resource.getrlimit(which)[1]
    with contextlib.suppress(ValueError):  # macOS takes no limit on memory
        resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _first(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else f"{words[:197]}..."


def _send(answers: BinaryIO, mark: bytes, answer: bytes) -> None:
    answers.write(FRAME.pack(mark, len(answer)))
    answers.write(answer)
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
