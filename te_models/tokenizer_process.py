"""The process in which a tokenizer's files are read and applied: run as a script, with limits; see `tokenizer`.

It imports nothing of the project, so that it starts in 0.06 s. Requests come on standard input and answers go to what
was standard output, each as a kind (one byte), a length (eight) and so many bytes:

    J  a tokenizer.json       -> its size (JSON)
    R  {"folder", "model"}    -> {"tokenizer", "bos", "eos"} (JSON): the tokenizer.json that is equal to the folder's
                                 tokenizer as transformers reads it, and the ids of two of its special tokens
    F  {"folder", "text"}     -> the ids of the text (uint32) with the folder's tokenizer, as transformers reads it
    C  {"folder", "messages"} -> rows of a chat with its template (`chat_rows`), uint32 each: the number of ids, of
                                 answers that nothing ends, and the ids; highest bit set: the loss counts them
    P  {"folder", "messages"} -> the ids of a chat up to where the next answer begins (uint32)
    T  {"folder"}             -> the ids of the tokens that end an answer (uint32)
    e  UTF-8 text             -> its ids, without special tokens;  E: with them
    f  UTF-8 text             -> its ids behind a line end, without what a tokenizer puts before the first word
    p  [prompt, answer]       -> their ids as one text (uint32); highest bit set: the answer's
    d  ids                    -> their UTF-8 text
    t  a token                -> its id (JSON)

Answers are "=" with a result or "!" with a sentence. Beyond the limits on memory and processor time the system ends the
process, and the one that asked says so.
"""

import contextlib
import json
import math
import os
import resource
import struct
import sys
from array import array
from pathlib import Path
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
        except BaseException as error:  # the Rust side raises bare Exceptions, and a panic is not an Exception
            mark, answer = b"!", f"the library refuses it ({_first(error)})".encode(errors="replace")
        _send(answers, mark, answer)


def _answer(state: dict[str, Any], kind: bytes, data: bytes) -> bytes:
    if kind == b"J":
        state["tokenizer"] = tokenizer = _load(data)
        state.pop("untrimmed", None)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        longest = max(map(len, vocabulary), default=0)
        if longest > BYTES_PER_TOKEN:
            raise LimitError(f"has a token of {longest} characters, more than the {BYTES_PER_TOKEN} allowed")
        return json.dumps(max(vocabulary.values(), default=-1) + 1).encode()  # there may be gaps
    of_folder = {b"R": _resolved, b"F": _of_folder, b"C": _of_chat, b"P": _of_prompt, b"T": _turn_ends}
    if kind in of_folder:
        return of_folder[kind](state, **json.loads(data))
    tokenizer = state["tokenizer"]
    if kind in (b"e", b"E"):
        return _bounded(tokenizer.encode(data.decode(), add_special_tokens=kind == b"E").ids, len(data))
    if kind == b"f":
        return _bounded(_following(tokenizer, data.decode()), len(data))
    if kind == b"p":
        return _of_pair(state, *json.loads(data))
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


def _resolved(state: dict[str, Any], folder: str, model: dict[str, Any]) -> bytes:
    tokenizer = _auto_tokenizer(folder, model)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LimitError(f"transformers reads it as a {type(tokenizer).__name__}, which no tokenizer.json can say")
    found = {"tokenizer": backend.to_str(), "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    return json.dumps(found).encode()


def _of_folder(state: dict[str, Any], folder: str, text: str) -> bytes:
    return _bounded(_auto_tokenizer(folder, {})(text)["input_ids"], len(text.encode()))


def _of_chat(
    state: dict[str, Any], folder: str, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any
) -> bytes:
    chat = _chat_tokenizer(state, folder, **options)
    found: list[int] = []
    try:
        rows = chat.rows(messages, tools)
    except state["chat_rows"].ChatError as error:
        raise LimitError(str(error)) from None
    for ids, scored, unended in rows:
        found += [len(ids), unended, *(id | mark << 31 for id, mark in zip(ids, scored, strict=True))]
    return array("I", found).tobytes()


def _of_prompt(
    state: dict[str, Any], folder: str, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any
) -> bytes:
    _chat_tokenizer(state, folder, **options)
    tokenizer = state["chat"]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return array("I", tokenizer(text, add_special_tokens=False)["input_ids"]).tobytes()


def _turn_ends(state: dict[str, Any], folder: str, **options: Any) -> bytes:
    return array("I", _chat_tokenizer(state, folder, **options).turn_ends()).tobytes()


def _chat_tokenizer(
    state: dict[str, Any], folder: str, model: dict[str, Any], ends: list[int], end: str | None, final: bool
) -> Any:
    """Return the `ChatRows` of a folder; the tokenizer itself is state["chat"]."""
    key = [folder, model, ends, end, final]
    if state.get("chat_key") != key:
        if "chat_rows" not in state:
            state["chat_rows"] = _beside("chat_rows")
        state["chat"] = tokenizer = _auto_tokenizer(folder, model)
        if not tokenizer.chat_template:
            raise LimitError("there is no chat template in the folder")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise LimitError(f"transformers reads it as a {type(tokenizer).__name__}, which gives no places of tokens")
        state["chat_of_folder"] = state["chat_rows"].ChatRows(tokenizer, ends, end=end, final=final)
        state["chat_key"] = key
    return state["chat_of_folder"]


def _beside(name: str) -> Any:
    """Import a file beside this script without the package that both are in."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _auto_tokenizer(folder: str, model: dict[str, Any]) -> Any:
    """model: what a configuration of the model says, where config.json of the folder is not transformers'."""
    # absent, to transformers: no tokenizer needs it, and importing it takes seconds
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import transformers

    transformers.utils.logging.set_verbosity_error()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if model:
        try:
            options["config"] = transformers.AutoConfig.for_model(model["model_type"])
        except ValueError:  # of a model that this transformers does not know
            options["config"] = transformers.PreTrainedConfig()
        options["config"].tokenizer_class = model.get("tokenizer_class")
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _following(tokenizer: Any, text: str) -> list[int]:
    """Encode behind a line end, and take its ids away again, where they are the same without the text."""
    line_end = tokenizer.encode("\n", add_special_tokens=False).ids
    ids = tokenizer.encode(f"\n{text}", add_special_tokens=False).ids
    if ids[: len(line_end)] == line_end:
        return ids[len(line_end) :]
    return tokenizer.encode(text, add_special_tokens=False).ids


def _of_pair(state: dict[str, Any], prompt: str, answer: str) -> bytes:
    if "untrimmed" not in state:
        state["untrimmed"] = untrimmed = type(state["tokenizer"]).from_str(state["tokenizer"].to_str())
        untrimmed.post_processor = None  # it moves the places of tokens
    found = state["untrimmed"].encode(prompt + answer, add_special_tokens=False)
    places = zip(found.ids, found.offsets, strict=True)
    return _bounded([id | (end > len(prompt)) << 31 for id, (_, end) in places], len((prompt + answer).encode()))


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
    """End this process after `seconds` more of processor time."""
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
