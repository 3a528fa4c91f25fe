"""The special tokens of a folder, resolved once for all that tokenize, train, evaluate, generate and export.

Which tokens begin and end a text, the tokenizer says: `special_tokens_map.json` where `tokenizer_config.json` lists no
tokens itself, else `tokenizer_config.json`, and last the class of the tokenizer, known to transformers. Where
generation ends, the model says: `generation_config.json`, else `config.json`; one id or a list. That is transformers'
order. Where the one says nothing, the other is asked.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..io.errors import CheckpointError
from ..io.strict_json import read_object
from ..io.weight_files import plain_file

GENERATION = "generation_config.json"
_BEGINNING = 4 << 20
"""Bytes of a tokenizer.json in which its added tokens are looked for; they stand before the vocabulary."""
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class SpecialTokenError(ValueError):
    """A file names a special token in another way than as text, or an id; the message is one sentence."""


@dataclass(frozen=True)
class ModelTokens:
    """Ids that a model's own files name. ends: where generation ends, in their order; bos, pad: None: not named."""

    ends: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None


def named_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens that the tokenizer's files name, by `NAMED`.

    Raises SpecialTokenError where one is not text, and CheckpointError for files that cannot be read or leave the
    folder.
    """
    settings = _read(folder, "tokenizer_config.json")
    found = {"tokenizer_config.json": settings}
    if "added_tokens_decoder" not in settings:
        found["special_tokens_map.json"] = _read(folder, "special_tokens_map.json")
    tokens: dict[str, str] = {}
    for file, values in found.items():
        for name in NAMED:
            token = values.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise SpecialTokenError(
                    f"{folder}/{file} has an {name} that is a {type(token).__name__}; allowed: text"
                )
            if token is not None:
                tokens[name] = token
    return tokens


def model_tokens(folder: Path) -> ModelTokens:
    """Return the ids that the files of a model's folder, ours or Hugging Face's, name.

    Raises SpecialTokenError for what is no id, and CheckpointError for files that cannot be read or leave the folder.
    """
    ends: tuple[int, ...] = ()
    one: dict[str, int] = {}
    for file, values in _configurations(folder):
        for name in ("bos_token_id", "pad_token_id"):
            ids = _ids(folder, file, name, values.get(name))
            if ids:
                one.setdefault(name, ids[0])
        ends = ends or _ids(folder, file, "eos_token_id", values.get("eos_token_id"))
    return ModelTokens(ends, one.get("bos_token_id"), one.get("pad_token_id"))


def ids_to_add(folder: Path, vocab_size: int) -> dict[str, int]:
    """Return the ids that the files of a model's folder should name and do not, by their keys, as its tokenizer has
    them; none of a tokenizer that cannot be read: it travels along as it is."""
    try:
        model, names, added = model_tokens(folder), named_tokens(folder), _added_tokens(folder)
    except (CheckpointError, SpecialTokenError, OSError):
        return {}
    known = {"bos": model.bos is not None, "eos": bool(model.ends), "pad": model.pad is not None}
    found = {f"{kind}_token_id": added.get(names.get(f"{kind}_token", "")) for kind in known if not known[kind]}
    return {name: id for name, id in found.items() if id is not None and id < vocab_size}


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens that tokenizer.json adds to its vocabulary, special ones among them, by text."""
    if not (folder / "tokenizer.json").exists():
        return {}
    with plain_file(folder, "tokenizer.json").open("rb") as file:
        text = file.read(_BEGINNING).decode("utf-8", "ignore")
    key = text.find('"added_tokens"')
    begin = text.find("[", key)
    if min(key, begin) < 0:
        return {}
    try:
        tokens, _ = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return {}
    tokens = [token for token in tokens if isinstance(token, dict) and type(token.get("id")) is int]
    return {token["content"]: token["id"] for token in tokens if isinstance(token.get("content"), str)}


def generation_config(folder: Path, ids: dict[str, int]) -> dict[str, Any]:
    """Return the content of a folder's generation_config.json with further ids."""
    return _read(folder, GENERATION) | ids


def hf_config(folder: Path) -> dict[str, Any]:
    """Return the Hugging Face configuration of a folder: its config.json, or the one that ours was imported with; empty
    for a folder without either."""
    values = _read(folder, "config.json")
    if values.get("model_type") != "te_models":
        return values
    source = values.get("source")
    original = source.get("config") if isinstance(source, dict) else None
    return original if isinstance(original, dict) else {}


def _configurations(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what may name ids, the first to ask first."""
    yield GENERATION, _read(folder, GENERATION)
    yield "config.json", _read(folder, "config.json")
    original = hf_config(folder)
    yield "config.json", original
    within = original.get("text_config")
    if isinstance(within, dict):
        yield "config.json", within


def _ids(folder: Path, file: str, name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if type(id) is not int:
            raise SpecialTokenError(
                f"{folder}/{file} has the {name} {str(value)[:80]}; allowed: a number or a list of them"
            )
    return tuple(dict.fromkeys(id for id in ids if id >= 0))


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not ((folder / name).exists() or (folder / name).is_symlink()):
        return {}
    return read_object(plain_file(folder, name))
