"""Hugging Face families: one small declarative file each, a configuration map and a weight map.

`model_type` in config.json selects the family. A folder that is labelled as another family than it is does not pass the
plan: its keys and shapes differ from what its configuration implies.
"""

from __future__ import annotations

from ..errors import CheckpointError
from .family import Family
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {f.model_type: f for f in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)}

__all__ = ["FAMILIES", "Family", "family_of"]


def family_of(model_type: object) -> Family:
    """Return the family of a `model_type`, or raise CheckpointError naming the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported families: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
