"""Tokenizers of model folders (extra `hf`), read and applied in a separate process, with limits.

A tokenizer's files are data from strangers, and the Rust library that reads them does not bound what they ask for: a
chain of replacements doubles a text at every step, a damaged character map panics, and a failed allocation ends the
process. So none of it happens in this process. The other one may use so much memory and processor time; what goes
wrong there, its end included, is one sentence here. It starts in 0.06 s, and a piece of text costs two copies.
A class of transformers that a folder names may read tokenizer.json in its own way. For such a folder transformers says
once which tokenizer.json is equal to that class, in another such process (one to two seconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_models.checkpoints.folder.special_tokens import hf_config, model_tokens, named_tokens

from . import tokenizer_process
from .child_process import exit_code, start_script
from .extras import require
from .tokenizer_process import BYTES_PER_TOKEN, FRAME, TOKENS_BESIDE, TOKENS_PER_BYTE

if TYPE_CHECKING:
    import subprocess

FILE = "tokenizer.json"
MAX_FILE_BYTES = 128 << 20
"""Of a tokenizer.json; the largest published ones have 35 MB."""
MAX_MEMORY_BYTES = 2 << 30
"""Of the process, its code left out; a vocabulary of 256,000 with 500,000 merges takes 0.2 GiB, a text of 1 MiB 0.3."""
MAX_SECONDS = 60
"""Of processor time for a request, and one more for each 16 KiB of text; a MiB usually takes one second."""
_TRANSFORMERS_MEMORY_BYTES = 6 << 30


class TokenizerError(ValueError):
    """A tokenizer's files cannot be read, or do not bear to be applied; the message is one sentence that names them."""


def tokenizer_folder(name: str | os.PathLike[str]) -> Path:
    """Return the folder that a tokenizer is read from: a path, or a text that is a hub id, of which no weights are
    downloaded. Raises TokenizerError where it has no tokenizer.json, CheckpointError as `local_folder` does."""
    from te_models.checkpoints.io.hub import ALLOWED, local_folder
    from te_models.checkpoints.io.model_folder import instead_of_model

    folder = local_folder(name, allow_patterns=[pattern for pattern in ALLOWED if pattern != "*.safetensors"])
    if not (folder / FILE).is_file():
        allowed = "allowed: one that has, a hub id, or 'bytes'"
        there = instead_of_model(folder, str(name))  # leads to a model that has its tokenizer
        raise TokenizerError(there or f"the tokenizer folder {name} has no {FILE}; {allowed}")
    return folder


class Tokenizer:
    """A tokenizer in a separate process; the process ends with it. Each method raises TokenizerError.

    bos and eos: the ids of its special tokens; None: it has none.
    """

    def __init__(self, data: bytes, where: str) -> None:
        """data: a tokenizer.json, called `where` in errors."""
        self.bos: int | None = None
        self.eos: int | None = None
        self._process = _Process(where, MAX_MEMORY_BYTES)
        try:
            self.vocab_size: int = json.loads(self._process.ask(b"J", data, 32))
        except TokenizerError:
            self.close()
            raise

    def beside(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before every text, and those that it puts behind."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        for begin in range(len(whole) - len(plain) + 1):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
        return [], []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of the whole text."""
        data = text.encode("utf-8", "surrogatepass")
        answer = self._process.ask(b"E" if add_special_tokens else b"e", data, _room(len(data)))
        return array("I", answer).tolist()

    def encode_following(self, text: str) -> list[int]:
        """Return the ids of a text that goes on behind a line end, without tokens beside it."""
        data = text.encode("utf-8", "surrogatepass")
        return array("I", self._process.ask(b"f", data, _room(len(data)))).tolist()

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt with its answer behind it, without tokens beside them, and 1 for each that has a
        part of the answer, else 0."""
        data = json.dumps([prompt, answer]).encode()
        marked = array("I", self._process.ask(b"p", data, _room(len(data)))).tolist()
        return [id & 0x7FFFFFFF for id in marked], [id >> 31 for id in marked]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens as they are written."""
        try:
            data = array("I", ids)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"ids cannot be decoded: {error}") from None
        return self._process.ask(b"d", data.tobytes(), BYTES_PER_TOKEN * len(data)).decode()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None: the tokenizer does not have it."""
        found: int | None = json.loads(self._process.ask(b"t", token.encode("utf-8", "surrogatepass"), 32))
        return found

    def close(self) -> None:
        """End the process."""
        self._process.close()


def read_tokenizer(folder: Path, feature: str) -> Tokenizer:
    """Return the tokenizer of a folder with a tokenizer.json, as transformers reads it: a class that the folder names
    may split texts otherwise than the file says. It turns the whole of any text into ids and nothing else.

    The file may say where texts are cut and to which length they are filled up: settings of the program that wrote it;
    they would drop or add tokens without a word. feature: what needs it, for the error where the extra is absent.

    Raises TokenizerError for a file that cannot be read, SpecialTokenError for special tokens that are no text, and
    CheckpointError for a file that is missing, no regular file, or a link that leaves the folder.
    """
    from te_models.checkpoints.io.weight_files import plain_file

    require("tokenizers", "hf", feature=feature)
    path = plain_file(folder, FILE)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TokenizerError(f"{path} has {size} bytes, more than the {MAX_FILE_BYTES} allowed for a tokenizer")
    tokens, model = named_tokens(folder), hf_config(folder)
    data = path.read_bytes()
    tokenizer = Tokenizer(data, str(path))  # with the file as it is: its limits are checked first
    eos = tokens.get("eos_token")
    if eos is not None and tokenizer.token_to_id(eos) is None:
        tokenizer.close()
        raise TokenizerError(f"{folder} names the eos_token {eos!r}, which its {FILE} does not have")
    if _is_of_a_class(folder, model):
        found = _as_transformers(folder, model)
        if found["tokenizer"] != data.decode("utf-8", "replace"):
            tokenizer.close()
            tokenizer = Tokenizer(found["tokenizer"].encode(), str(path))
        tokenizer.bos, tokenizer.eos = found["bos"], found["eos"]
    else:
        for name in ("bos", "eos"):
            token = tokens.get(f"{name}_token")
            setattr(tokenizer, name, None if token is None else tokenizer.token_to_id(token))
    return tokenizer


def ends_of(folder: Path, tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids at which a model's text ends: what its folder says, or else the end of the tokenizer's texts."""
    ends = model_tokens(folder).ends
    return list(ends) if ends or tokenizer is None or tokenizer.eos is None else [tokenizer.eos]


def document_end(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a document: the tokenizer's end of a text, or else the first at which its folder says
    that generation ends; None: neither is there."""
    ends = [id for id in model_tokens(folder).ends if id < tokenizer.vocab_size]
    return tokenizer.eos if tokenizer.eos is not None else ends[0] if ends else None


def _is_of_a_class(folder: Path, model: dict[str, Any]) -> bool:
    """Whether transformers may read a folder as more than the tokenizer.json says: by a class, or a kind of model."""
    from te_models.checkpoints.io.strict_json import read_object

    path = folder / "tokenizer_config.json"
    name = (read_object(path) if path.is_file() else {}).get("tokenizer_class")
    return name not in (None, "PreTrainedTokenizerFast", "TokenizersBackend") or "model_type" in model


_resolved: dict[tuple[Any, ...], dict[str, Any]] = {}
"""By the files of a folder as they were: what `_as_transformers` returned last, because that takes seconds."""


def _as_transformers(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to "R", of `tokenizer_process`."""
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file()]
    key = (folder.resolve(), tuple(sorted(stats)))
    if key not in _resolved:
        _check_folder(folder)
        process = _Process(f"the tokenizer of {folder}", _TRANSFORMERS_MEMORY_BYTES)
        try:
            asked = json.dumps({"folder": str(folder.resolve()), "model": _of_model(folder, model)}).encode()
            found: dict[str, Any] = json.loads(process.ask(b"R", asked, 4 * MAX_FILE_BYTES))
        finally:
            process.close()
        _resolved.clear()
        _resolved[key] = found
    return _resolved[key]


def _of_model(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers asks a model's configuration for, where it does not know the folder's config.json."""
    path = folder / "config.json"
    if not model or not path.is_file() or '"te_models"' not in path.read_text(encoding="utf-8", errors="replace"):
        return {}
    return {name: model.get(name) for name in ("model_type", "tokenizer_class")}


def encode_as_transformers(folder: Path, text: str) -> list[int]:
    """Return the ids of a text with the tokenizer of a folder, of whichever kind, as `AutoTokenizer` reads it from the
    disk, without code that the folder brings.

    Raises MissingExtraError, CheckpointError for files that are too large or leave the folder, and TokenizerError.
    """
    _check_folder(folder)
    process = _Process(f"the tokenizer of {folder}", _TRANSFORMERS_MEMORY_BYTES)
    try:
        asked = json.dumps({"folder": str(folder.resolve()), "text": text}).encode()
        return array("I", process.ask(b"F", asked, _room(len(text.encode())))).tolist()
    finally:
        process.close()


def _check_folder(folder: Path) -> None:
    """Raise MissingExtraError without transformers, and CheckpointError for files that it should not read."""
    from te_models.checkpoints.io.weight_files import plain_file
    from te_models.checkpoints.write.sidecars import find_sidecars

    require("transformers", "hf", feature="reading a tokenizer")
    find_sidecars(folder, {})
    for path in folder.iterdir():  # transformers knows more names
        if not path.is_dir():
            plain_file(folder, path.name)


class ChatTokenizer:
    """The tokenizer of a folder with its chat template, as `AutoTokenizer` reads them, in a separate process.

    ends: tokens at which generation ends. end: a token to write behind answers that the template ends with none. final:
    see `encode`.
    """

    def __init__(self, folder: Path, *, ends: Sequence[int] = (), end: str | None = None, final: bool = False) -> None:
        """Raises as `encode_as_transformers` does."""
        _check_folder(folder)
        self._process = _Process(f"the chat template of {folder}", _TRANSFORMERS_MEMORY_BYTES)
        model = _of_model(folder, hf_config(folder))
        self._asked = {"folder": str(folder.resolve()), "model": model, "ends": list(ends), "end": end, "final": final}

    @property
    def closed(self) -> bool:
        """Whether the process has ended: what it was asked for last was too much."""
        return self._process.closed

    def encode(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> list[tuple[list[int], list[int], int]]:
        """Return the rows of a chat: the ids, for each whether the loss counts it (1) or not (0), and how many answers
        of the row no token ends.

        The ids are what `apply_chat_template` gives. The loss counts what the assistant writes, with the token that
        ends its turn: what the template marks (`{% generation %}`), or what a message adds to the chat before it and
        the prompt of an answer. Where a template writes earlier answers otherwise when a chat goes on, each of them has
        a row that ends with it; with `final` there is one row, the chat as it is written at the end. A message with a
        "weight" of 0 is not counted. Raises TokenizerError where the template refuses the messages, or is absent.
        """
        answer = array("I", self._ask(b"C", messages, tools, 2 * len(messages) + 2)).tolist()
        rows, at = [], 0
        while at < len(answer):
            count, unended = answer[at : at + 2]
            marked = answer[at + 2 : at + 2 + count]
            rows.append(([id & 0x7FFFFFFF for id in marked], [id >> 31 for id in marked], unended))
            at += 2 + count
        return rows

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Return the ids of a chat up to where the assistant's next message begins (`add_generation_prompt`). Raises
        TokenizerError where the template refuses the messages, or is absent."""
        return array("I", self._ask(b"P", messages, tools, 2)).tolist()

    def turn_ends(self) -> list[int]:
        """Return the ids of the tokens that end an answer: `ends`, and what the template writes behind one."""
        return array("I", self._process.ask(b"T", json.dumps(self._asked).encode(), 1 << 16)).tolist()

    def _ask(self, kind: bytes, messages: list[dict[str, Any]], tools: list[Any] | None, times: int) -> bytes:
        asked = json.dumps({**self._asked, "messages": messages, "tools": tools}).encode()
        return self._process.ask(kind, asked, _room(len(asked)) * times)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _room(nbytes: int) -> int:
    return 4 * (TOKENS_PER_BYTE * nbytes + TOKENS_BESIDE)


class _Process:
    """A `tokenizer_process`. where: what it reads, for errors."""

    def __init__(self, where: str, memory_bytes: int, seconds: int = MAX_SECONDS) -> None:
        self._where, self._memory_bytes, self._seconds = where, memory_bytes, seconds
        variables = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        try:
            process = start_script(tokenizer_process.__file__, [str(memory_bytes), str(seconds)], variables)
        except OSError as error:
            raise TokenizerError(f"{where} cannot be read: no process for it starts ({error.strerror})") from error
        self._process: subprocess.Popen[bytes] = process
        self._end = weakref.finalize(self, _end, process)

    def ask(self, kind: bytes, data: bytes, room: int) -> bytes:
        """Send a request and return the answer. room: how many bytes it may have."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None, "pipes, above"
        if self.closed:
            raise TokenizerError(f"{self._where} was closed")
        head = b""
        with contextlib.suppress(BrokenPipeError):
            requests.write(FRAME.pack(kind, len(data)))
            requests.write(data)
            requests.flush()
            head = answers.read(FRAME.size)
        if len(head) < FRAME.size:
            raise self._died()
        mark, length = FRAME.unpack(head)
        if length > max(room, 1024):
            self.close()
            raise TokenizerError(f"{self._where} cannot be used: an answer of {length} bytes is more than allowed")
        answer = answers.read(length)
        if len(answer) < length:
            raise self._died()
        if mark != b"=":
            raise TokenizerError(f"{self._where} cannot be used: {answer.decode(errors='replace')}")
        return answer

    def _died(self) -> TokenizerError:
        """What to say of a process that gave no answer."""
        code = exit_code(self._process, 5)
        self.close()
        reason = f"the process that reads it ended with code {code}"
        if code == -signal.SIGXCPU:
            reason = f"it takes more than the {self._seconds} seconds of processor time allowed"
        elif code in (-signal.SIGABRT, -signal.SIGKILL):
            allowed = f"{self._memory_bytes >> 20} MiB of memory"
            reason = f"it ends the library that reads it, as taking more than the {allowed} allowed does"
        elif code is not None and code < 0:
            reason = f"it ends the library that reads it ({signal.Signals(-code).name})"
        return TokenizerError(f"{self._where} cannot be used: {reason}")

    @property
    def closed(self) -> bool:
        return self._process.poll() is not None or self._process.stdin is None or self._process.stdin.closed

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process, whatever it does."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    process.kill()
    process.wait()
