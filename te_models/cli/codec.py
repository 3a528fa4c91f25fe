"""From text to the tokens of a model and back, for the verbs that run models: a tokenizer folder, or bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..tokenizer import FILE, Tokenizer, document_end, read_tokenizer, tokenizer_folder

BYTES = "bytes"
_END_OF_BYTES = 256


@dataclass(frozen=True)
class Codec:
    """encode: ids of a text, without tokens beside it; whole: with them. eos: the token that ends a text; None: the
    tokenizer has none. folder: of the tokenizer; None: bytes. tokenizer: what reads it; None: bytes."""

    encode: Callable[[str], list[int]]
    whole: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos: int | None
    folder: Path | None
    tokenizer: Tokenizer | None = None

    def prompt_ids(self, prompt: str) -> list[int]:
        """The tokens to continue: as transformers, with those that the tokenizer puts before every text, but without
        those that it puts behind it. A prompt that has the first ones written out gets no second ones."""
        prompt_tokens = self.encode(prompt)
        if not prompt_tokens:
            raise ValueError("the prompt is empty")
        whole = self.whole(prompt)
        before = next((i for i in range(len(whole)) if whole[i : i + len(prompt_tokens)] == prompt_tokens), 0)
        return prompt_tokens if prompt_tokens[:before] == whole[:before] else whole[:before] + prompt_tokens

    def prefix(self) -> list[int]:
        """The tokens before every text, or the token that ends the text before it, where there are any."""
        before = self.prompt_ids("a")[: -len(self.encode("a"))]
        return before or ([] if self.eos is None else [self.eos])


def open_codec(folder: Path, tokenizer: str | None, feature: str) -> Codec:
    """Return what --tokenizer names: "bytes", a folder, or for None the model's folder. feature: what needs it.

    Raises ValueError for a folder without a tokenizer, and as `read_tokenizer` does."""
    if tokenizer == BYTES:
        return Codec(_bytes, _bytes, _text_of_bytes, _END_OF_BYTES, None)
    where = folder if tokenizer is None else tokenizer_folder(tokenizer)
    if not (where / FILE).is_file():
        raise ValueError(f"{where} has no {FILE}; --tokenizer names a folder that has one, or 'bytes'")
    read = read_tokenizer(where, feature)
    return Codec(
        lambda text: read.encode(text, add_special_tokens=False),
        read.encode,
        read.decode,
        document_end(where, read),
        where,
        read,
    )


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))


def _text_of_bytes(ids: Sequence[int]) -> str:
    return bytes(id for id in ids if id < _END_OF_BYTES).decode("utf-8", "replace")


def check_device(name: str) -> None:
    """Raise ValueError for a device that is not there."""
    import torch

    gpus = torch.cuda.device_count()
    allowed = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    allowed += ["mps"] if torch.backends.mps.is_available() else []
    if name not in allowed:
        raise ValueError(f"--device is {name!r}; allowed here: {', '.join(allowed)}")
