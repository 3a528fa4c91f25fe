"""Passthrough tensors: a Hugging Face folder holds them, the model does not use them, and an export gives them back
byte for byte, whatever their dtype. The family says which ones (`families/base/unused.py`).

In our folders their names begin with `carried.`, followed by the name in the Hugging Face files. They are no
parameters: they are never loaded, quantized or converted to another dtype. Only those that are quantized become values
where files no longer declare their format (`quantized/passthrough_values.py`).
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from ..families import FAMILIES, Family

PREFIX = "carried."


def passthrough_tensors(
    extra: Iterable[str], family: str | None, hf: Mapping[str, Any], *, in_our_folder: bool
) -> dict[str, str]:
    """Return stored name -> Hugging Face name of those tensors in `extra` that the family passes through."""
    known = FAMILIES.get(family or "")
    if known is None:
        return {}
    prefix = PREFIX if in_our_folder else ""
    names = {name: name.removeprefix(prefix) for name in extra if name.startswith(prefix)}
    return {name: theirs for name, theirs in names.items() if known.unused.holds(theirs, hf)}


def our_names(passthrough: Mapping[str, str]) -> dict[str, str]:
    """Return stored name -> name in a folder of ours."""
    return {name: PREFIX + theirs for name, theirs in passthrough.items()}


def names_in_export(
    passthrough: Mapping[str, str], hf: Mapping[str, Any], target: Family, used: Container[str]
) -> dict[str, str]:
    """Return stored name -> name in an export as `target`; that family must pass such tensors through, too, and use no
    such name itself."""
    return {n: theirs for n, theirs in passthrough.items() if target.unused.holds(theirs, hf) and theirs not in used}
