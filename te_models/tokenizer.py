"""Reading the tokenizer of a model folder (extra `hf`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .extras import require


def read_tokenizer(file: Path, feature: str) -> Any:
    """Return the tokenizer of a tokenizer.json, which turns the whole of any text into ids and nothing else.

    The file may say where texts are cut and to which length they are filled up: settings of the program that wrote it,
    which would drop or add tokens without a word. feature: what needs it, for the error where the extra is absent.
    """
    tokenizer = require("tokenizers", "hf", feature=feature).Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
