"""Key-value caches: buffers that fill up (`kv_cache`), and fixed shapes that one graph decodes with (`static`).

May import: the configuration and the layer set.
"""

from .kv_cache import KVCache, LayerMemory, Memory
from .static import StaticKVCache

__all__ = ["KVCache", "LayerMemory", "Memory", "StaticKVCache"]
