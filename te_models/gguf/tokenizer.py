"""The tokenizer of a folder as llama.cpp's key-value pairs.

Byte-level BPE ("gpt2") has its vocabulary and merges; BPE over pieces with bytes to fall back on, as sentencepiece
makes it ("llama"), has scores instead, by which llama.cpp merges: the merge of rank n gets -n. How text is split before
that is a name (`tokenizer.ggml.pre`), looked up by the pattern that tokenizer.json has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.errors import CheckpointError
from te_models.checkpoints.io.strict_json import read_object

from ..extras import require

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_PATTERNS = {_GPT2: "gpt-2", _QWEN2: "qwen2", _LLAMA3: "llama-bpe"}


def tokenizer_values(folder: Path, config: Mapping[str, Any], arch: str) -> tuple[dict[str, Any], list[str]]:
    """Return the key-value pairs of a folder's tokenizer.json and notes for the user; none where there is no such
    file. CheckpointError for a tokenizer of another kind."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}, ["the folder has no tokenizer.json, so the file has no tokenizer"]
    values = read_object(path)
    model = values.get("model")
    if (
        not isinstance(model, dict)
        or model.get("type") not in ("BPE", None)
        or not isinstance(model.get("vocab"), dict)
    ):
        kind = model.get("type") if isinstance(model, dict) else None
        raise CheckpointError(f"{path} is a tokenizer of the type {kind!r}, which is not written to GGUF; allowed: BPE")
    vocab: dict[str, int] = dict(model["vocab"])
    added = {t["content"]: t for t in values.get("added_tokens", [])}
    vocab |= {content: token["id"] for content, token in added.items()}
    size = max(config["vocab_size"], max(vocab.values(), default=-1) + 1)
    if size > config["vocab_size"]:
        raise CheckpointError(f"{path} has {size} tokens, and the model {config['vocab_size']}")
    names = {number: name for name, number in vocab.items()}
    pieces = bool(model.get("byte_fallback"))
    tokens, kinds = [], []
    for number in range(size):
        name = names.get(number)
        tokens.append(f"[PAD{number}]" if name is None else name)
        kinds.append(_UNUSED if name is None else _kind(name, added, model, pieces=pieces))
    merges = [" ".join(m) if isinstance(m, list) else m for m in model.get("merges", [])]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if pieces else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    notes: list[str] = []
    if pieces:
        ranks = {"".join(merge.split(" ", 1)): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
        found["tokenizer.ggml.scores"] = [ranks.get(token, -1e6) for token in tokens]
        found["tokenizer.ggml.add_space_prefix"] = _adds_space(values)
        found["tokenizer.ggml.pre"] = "default"
        if not {*ranks} >= _made_of_two(vocab):
            notes.append(
                "llama.cpp merges any two pieces that are one together, and this tokenizer does not; check its tokens"
            )
    else:
        found["tokenizer.ggml.merges"] = merges
        found["tokenizer.ggml.pre"] = _pre(values, notes)
    for name, key in {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}.items():
        number = config.get(key)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < size:
            found[f"tokenizer.ggml.{name}_token_id"] = number
    found |= _settings(folder)
    return found, notes


def _made_of_two(vocab: Mapping[str, int]) -> set[str]:
    """Return the pieces that two others are together, bytes aside."""
    names = {name for name in vocab if not (len(name) == 6 and name.startswith("<0x"))}
    return {name for name in names if any(name[:i] in names and name[i:] in names for i in range(1, len(name)))}


def _kind(name: str, added: Mapping[str, Any], model: Mapping[str, Any], *, pieces: bool) -> int:
    if name in added:
        return _CONTROL if added[name].get("special") else _USER
    if pieces and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return _BYTE
    return _UNKNOWN if pieces and name == model.get("unk_token") else _NORMAL


def _parts(step: Any) -> list[dict[str, Any]]:
    if not isinstance(step, dict):
        return []
    inner = step.get("pretokenizers") or step.get("normalizers")
    return [part for found in inner for part in _parts(found)] if isinstance(inner, list) else [step]


def _adds_space(values: Mapping[str, Any]) -> bool:
    steps = [*_parts(values.get("normalizer")), *_parts(values.get("pre_tokenizer"))]
    return any(s.get("type") == "Prepend" or s.get("prepend_scheme") in ("first", "always") for s in steps)


def _pre(values: Mapping[str, Any], notes: list[str]) -> str:
    steps = _parts(values.get("pre_tokenizer"))
    patterns = [
        s["pattern"].get("Regex") for s in steps if s.get("type") == "Split" and isinstance(s.get("pattern"), dict)
    ]
    if len(patterns) == 1 and patterns[0] in _PATTERNS:
        return _PATTERNS[patterns[0]]
    if not patterns and any(s.get("type") == "Digits" and s.get("individual_digits") for s in steps):
        return "smollm"
    if not patterns and any(s.get("type") == "ByteLevel" for s in steps):
        return "gpt-2"
    notes.append("llama.cpp has no name here for how this tokenizer splits text; the file says gpt-2, check its tokens")
    return "gpt-2"


def split_as_named(tokenizer: Any, name: str) -> str | None:
    """Have a byte-level tokenizer of transformers split text as llama.cpp's name says: transformers splits as gpt-2
    does, whatever the name. Return a note where the name is not known here."""
    steps = require("tokenizers.pre_tokenizers", "hf", feature="the tokenizer")
    patterns = {known: pattern for pattern, known in _PATTERNS.items()}
    if name == "smollm":
        first = steps.Digits(individual_digits=True)
    elif name in patterns and name != "gpt-2":
        first = steps.Split(require("tokenizers", "hf").Regex(patterns[name]), "isolated")
    else:
        first = None
    whole = first is None or name == "smollm"  # byte levels split as gpt-2 does, unless told otherwise
    bytes_ = steps.ByteLevel(add_prefix_space=False, use_regex=whole)
    tokenizer.backend_tokenizer.pre_tokenizer = bytes_ if first is None else steps.Sequence([first, bytes_])
    if first is None and name not in ("gpt-2", "default"):
        return f"this tokenizer splits text as {name!r} says, which is not known here; gpt-2's way is taken, check it"
    return None


def add_space(tokenizer: Any, prefix: bool) -> None:
    """Have a tokenizer of pieces put a space before text as llama.cpp does: also before text that begins with one."""
    steps = require("tokenizers.normalizers", "hf", feature="the tokenizer")
    first = [steps.Prepend("\u2581")] if prefix else []
    tokenizer.backend_tokenizer.normalizer = steps.Sequence([*first, steps.Replace(" ", "\u2581")])
    tokenizer.backend_tokenizer.pre_tokenizer = None


def _settings(folder: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json says that llama.cpp knows."""
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    values = read_object(path) if path.is_file() else {}
    found: dict[str, Any] = {}
    for key, name in {"add_bos_token": "add_bos_token", "add_eos_token": "add_eos_token"}.items():
        if isinstance(values.get(key), bool):
            found[f"tokenizer.ggml.{name}"] = values[key]
    chat = template.read_text(encoding="utf-8") if template.is_file() else values.get("chat_template")
    if isinstance(chat, str):
        found["tokenizer.chat_template"] = chat
    elif isinstance(chat, list):
        named = {entry.get("name"): entry.get("template") for entry in chat if isinstance(entry, dict)}
        if isinstance(named.get("default"), str):
            found["tokenizer.chat_template"] = named["default"]
    return found
