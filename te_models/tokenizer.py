"""Tokenizers of model folders (extra `hf`), read and applied in a process of their own, with limits.

A tokenizer's files are data from strangers, and the Rust library that reads them does not bound what they ask for: a
chain of replacements doubles a text at every step, a damaged character map panics, and a failed allocation ends the
process. So none of it happens in this process. The other one may use so much memory and processor time; what goes
wrong there, its end included, is one sentence here. It starts in 0.06 s, and a piece of text costs two copies.
"""

from __future__ import annotations

import contextlib
import json
import signal
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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


class Tokenizer:
    """A tokenizer in a process of its own, which ends with it. Each method raises TokenizerError."""

    def __init__(self, data: bytes, where: str) -> None:
        """data: a tokenizer.json, which `where` names in errors."""
        self._process = _Process(where, MAX_MEMORY_BYTES)
        try:
            self.vocab_size: int = json.loads(self._process.ask(b"J", data, 32))
        except TokenizerError:
            self.close()
            raise

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of the whole text."""
        data = text.encode("utf-8", "surrogatepass")
        answer = self._process.ask(b"E" if add_special_tokens else b"e", data, _room(len(data)))
        return array("I", answer).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens as they are written."""
        try:
            data = array("I", ids)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"ids cannot be decoded: {error}") from None
        return self._process.ask(b"d", data.tobytes(), BYTES_PER_TOKEN * len(data)).decode()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None: there is none."""
        found: int | None = json.loads(self._process.ask(b"t", token.encode("utf-8", "surrogatepass"), 32))
        return found

    def close(self) -> None:
        """End the process."""
        self._process.close()


def read_tokenizer(folder: Path, feature: str) -> Tokenizer:
    """Return the tokenizer of a folder's tokenizer.json, which turns the whole of any text into ids and nothing else.

    The file may say where texts are cut and to which length they are filled up: settings of the program that wrote it,
    which would drop or add tokens without a word. feature: what needs it, for the error where the extra is absent.

    Raises TokenizerError for a file that cannot be read, and CheckpointError for one that is missing, no regular file,
    or a link that leaves the folder.
    """
    from te_models.checkpoints.io.weight_files import plain_file

    require("tokenizers", "hf", feature=feature)
    path = plain_file(folder, FILE)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TokenizerError(f"{path} has {size} bytes, more than the {MAX_FILE_BYTES} allowed for a tokenizer")
    return Tokenizer(path.read_bytes(), str(path))


def end_token(folder: Path) -> str | None:
    """Return the `eos_token` of a folder's tokenizer_config.json; None where it, or the file, is absent.

    Raises CheckpointError as `read_tokenizer` does, and TokenizerError where it is no text.
    """
    from te_models.checkpoints.io.strict_json import read_object
    from te_models.checkpoints.io.weight_files import plain_file

    name = "tokenizer_config.json"
    if not ((folder / name).exists() or (folder / name).is_symlink()):
        return None
    token = read_object(plain_file(folder, name)).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise TokenizerError(f"{folder}/{name} has an eos_token that is a {type(token).__name__}; allowed: text")
    return token


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
    """The tokenizer of a folder with its chat template, as `AutoTokenizer` reads them, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        """Raises as `encode_as_transformers` does."""
        _check_folder(folder)
        self._process = _Process(f"the chat template of {folder}", _TRANSFORMERS_MEMORY_BYTES)
        self._folder = str(folder.resolve())

    def encode(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Return the ids of a chat, and for each whether the assistant wrote it (1) or not (0).

        Templates that mark what the assistant writes (`{% generation %}`) say so themselves. With others, its part is
        what a message adds to the chat before it and the prompt of an answer: the template has to write chats so that a
        longer one begins with a shorter one. Raises TokenizerError where it does not, refuses the messages, or is
        absent.
        """
        asked = json.dumps({"folder": self._folder, "messages": messages}).encode()
        size = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in messages)
        marked = array("I", self._process.ask(b"C", asked, _room(size) * (len(messages) + 1))).tolist()
        return [id & 0x7FFFFFFF for id in marked], [id >> 31 for id in marked]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a chat up to where the assistant's next message begins (`add_generation_prompt`). Raises
        TokenizerError where the template refuses the messages, or is absent."""
        asked = json.dumps({"folder": self._folder, "messages": messages}).encode()
        size = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in messages)
        return array("I", self._process.ask(b"P", asked, _room(size) * (len(messages) + 1))).tolist()

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
        if self._process.poll() is not None or requests.closed:
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

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process, whatever it does."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        _close(pipe)
    process.kill()
    process.wait()


def _close(pipe: BinaryIO | Any) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
