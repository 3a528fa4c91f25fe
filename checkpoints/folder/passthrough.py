"""Tensors that travel along: a Hugging Face folder holds them, the model does not use them, and an export gives them
back byte for byte, whatever their dtype. The family says which ones (`families/unused.py`).

In our folders their names begin with `carried.`, followed by the name in the Hugging Face files. They are no
parameters: they are never loaded, quantized or converted to another dtype. Only those that are quantized become values
where files no longer declare their format (`carried_values.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from ..families import FAMILIES, Family

PREFIX = "carried."


def carried_tensors(
    extra: Iterable[str], family: str | None, hf: Mapping[str, Any], *, in_our_folder: bool
) -> dict[str, str]:
    """Return stored name -> Hugging Face name of those tensors in `extra` that the family carries."""
    if family not in FAMILIES:
        return {}
    prefix = PREFIX if in_our_folder else ""
    names = {name: name.removeprefix(prefix) for name in extra if name.startswith(prefix)}
    return {name: theirs for name, theirs in names.items() if FAMILIES[family].unused.holds(theirs, hf)}


def our_names(carried: Mapping[str, str]) -> dict[str, str]:
    """Return stored name -> name in a folder of ours."""
    return {name: PREFIX + theirs for name, theirs in carried.items()}


def names_in_export(
    carried: Mapping[str, str], hf: Mapping[str, Any], target: Family, used: Container[str]
) -> dict[str, str]:
    """Return stored name -> name in an export as `target`, which must carry such tensors, too, and not use the name."""
    return {n: theirs for n, theirs in carried.items() if target.unused.holds(theirs, hf) and theirs not in used}
