"""Caches: buffers that fill up (`kv_cache`), fixed shapes that one graph decodes with (`static`), states (`states`).

May import: the configuration and the layer set.
"""

from .kv_cache import KVCache, LayerMemory, Memory
from .states import PairMemory, StateMemory
from .static import StaticKVCache

__all__ = ["KVCache", "LayerMemory", "Memory", "PairMemory", "StateMemory", "StaticKVCache"]
