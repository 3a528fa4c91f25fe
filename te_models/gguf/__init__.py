"""GGUF, the files of llama.cpp: read into a folder of ours, whatever their blocks, and written from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .reading import import_gguf
    from .writing import export_gguf

__all__ = ["export_gguf", "import_gguf"]

__getattr__, __dir__ = lazy_names(__name__)
