"""The examples of public names: cells of the files in docs/examples, for the reference and the tests.

A cell begins with a line `# %% Name, Name` and ends before the next one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

EXAMPLES = {
    "te_models": "te_models.py",
    "te_models.layers": "layers.py",
    "te_models.layers.ops": "ops.py",
    "te_models.layers.optimizers": "optimizers.py",
    "te_models.checkpoints": "checkpoints.py",
    "te_models.parallel": "parallel.py",
    "te_models.plan": "plan.py",
    "te_models.training": "training.py",
    "te_models.hf": "hf.py",
    "te_models.lora": "lora.py",
}
"""Package: the file of its examples."""


class Example(NamedTuple):
    """A cell. names: the public names that it shows; code: what stands below them."""

    names: tuple[str, ...]
    code: str


def examples(package: str) -> list[Example]:
    """Return the examples of a package in order; a package without a file has none."""
    if package not in EXAMPLES:
        return []
    text = (Path(__file__).parent / "examples" / EXAMPLES[package]).read_text(encoding="utf-8")
    cells = re.split(r"^# %% ", text, flags=re.MULTILINE)[1:]
    parts = (cell.partition("\n") for cell in cells)
    return [Example(tuple(names.partition("  #")[0].split(", ")), code.strip() + "\n") for names, _, code in parts]
