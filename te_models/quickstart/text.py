"""The real text of the quickstart: source files of the running Python's standard library, always there.

One file in twenty is held out: perplexity and logits are measured on text that training never sees.
"""

import sysconfig
from pathlib import Path
from typing import Any

import torch

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "turtledemo", "pydoc_data"}
_HELD_OUT_EVERY = 20


def library_files() -> tuple[list[Path], list[Path]]:
    """Return (training files, held-out files): modules of at least 4 KiB, without tests and tables, in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not _SKIPPED & set(file.relative_to(root).parts) and file.stat().st_size >= 4096
    ]
    held_out = files[::_HELD_OUT_EVERY]
    return [file for file in files if file not in set(held_out)], held_out


def middle_windows(tokenizer: Any, files: list[Path], count: int, length: int) -> torch.Tensor:
    """Return `length` tokens from the middle of each of `count` files, spread over `files`; [count, length] int64.

    Raises:
        ValueError: Too few files are that long.
    """
    windows = []
    step = max(1, len(files) // count)
    for file in [file for start in range(step) for file in files[start::step]]:
        text = file.read_text(encoding="utf-8")
        ids = tokenizer(text[len(text) // 2 :], add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= length:
            windows.append(ids[:length])
        if len(windows) == count:
            return torch.tensor(windows, device="cpu")
    raise ValueError(f"only {len(windows)} of {len(files)} text files have {length} tokens; {count} are needed")
