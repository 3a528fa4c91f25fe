"""Files that travel with the weights, unchanged, in both directions: the tokenizer's and the image processor's.

Some models bring code; `auto_map` in their JSON files names it. Those files are copied as bytes, like a
vocabulary, so that what points at them is not left pointing at nothing. Nothing here imports or runs them.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..folder.te_folder import CONFIG, MODEL_TYPE
from ..formats import SEPARATE
from ..io.errors import CheckpointError, shorten
from ..io.strict_json import read_object
from ..io.weight_files import TEMPLATES, file_inside, plain_file

_PATTERNS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
)
_WITH_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files besides config.json that name code."""

_MAX_BYTES = 256 << 20

_MAX_CODE_READ = 1 << 20
"""Where in a file with code its imports are looked for."""

_REFERENCE = re.compile(r"([A-Za-z_]\w{0,99})\.[A-Za-z_]\w*", re.ASCII)
"""A class in a file of the same folder. One of another repository has `--` in it, and means no file here."""

_RELATIVE_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+\.(\w{1,100})[ \t]+import\b|import[ \t]+\.(\w{1,100})\b)", re.MULTILINE
)

_NOT_MISSED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl"),
    *("*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.npz"),
    *("*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", ".*"),
    *(CONFIG, SEPARATE, "manifest.json", "conversion.json"),
)
"""Files that are no part of a model, or written again: weights, and what people read."""


def find_sidecars(folder: Path | None, config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of `folder` that go into a new one whose config.json has the content `config`, by their names.

    Raises CheckpointError for one that is too large, or leads out of the folder.
    """
    found: dict[str, Path] = {}
    if folder is None:
        return found
    for name in [*_matching(folder), *_templates(folder), *_code(folder, config)]:
        path = file_inside(folder, name)
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{name} of {folder} has {path.stat().st_size} bytes, too many for a tokenizer file")
        found[name] = path
    return found


def note_left_behind(folder: Path, sidecars: Mapping[str, Path]) -> tuple[str, ...]:
    """Return a sentence with the names of the files that do not travel along, if there are any that may be missed."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in sidecars)
    missed = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _NOT_MISSED)]
    return (f"files of {folder} that are left behind: {shorten(missed, 8)}",) if missed else ()


def _matching(folder: Path) -> list[str]:
    names = (path.name for path in folder.iterdir() if path.is_symlink() or not path.is_dir())
    return sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS))


def _templates(folder: Path) -> list[str]:
    """The chat templates besides the first: transformers keeps them in a separate folder."""
    return sorted(f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))


def _code(folder: Path, config: Any) -> Iterator[str]:
    """The files with code that the JSON files name, and those that they import from beside them."""
    if config.get("model_type") == MODEL_TYPE:  # ours: it holds the configuration that it comes from
        source = config.get("source")
        config = source.get("config") if isinstance(source, dict) else None
    maps = [config.get("auto_map") if isinstance(config, Mapping) else None]
    for name in _WITH_CODE:
        if (folder / name).is_file():
            try:
                maps.append(read_object(plain_file(folder, name), name).get("auto_map"))
            except CheckpointError:
                continue  # it travels along as it is, readable or not
    waiting = [match[1] for text in _references(maps) if (match := _REFERENCE.fullmatch(text))]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop() + ".py"
        if name in seen or not ((folder / name).is_file() or (folder / name).is_symlink()):
            continue
        seen.add(name)
        yield name
        with file_inside(folder, name).open("rb") as file:
            waiting += [(a or b).decode() for a, b in _RELATIVE_IMPORT.findall(file.read(_MAX_CODE_READ))]


def _references(maps: list[Any]) -> Iterator[str]:
    """The texts in the values of auto_maps: one, or for tokenizers a list of two."""
    for entries in maps:
        for value in entries.values() if isinstance(entries, dict) else ():
            yield from (text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))
