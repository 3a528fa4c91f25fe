"""SHA-256 of parts of equal size, several at once where the processor has instructions for it.

hashlib hashes one message at a time and so uses a third of these instructions' throughput (`kernels/cpp/sha256.cpp`).
Of a few bytes, and without a compiler or the instructions, hashlib computes the same digests.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from typing import Any

from te_models.kernels import cpp_library
from te_models.kernels.libraries import Compiled, has_library

SHA256_BYTES = 32
LEAST = 1 << 18
"""Bytes of a call for the library: small folders need not wait until it is compiled."""

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def digests_of_each(data: memoryview, size: int) -> bytes:
    """Return the digests, SHA256_BYTES each, of as many parts of `size` bytes as `data` has; it has nothing else.

    data: contiguous. The interpreter lock is free meanwhile. ValueError for a size of which `data` is no multiple.
    """
    data = data.cast("B")
    if size < 1 or len(data) % size:
        raise ValueError(f"parts have {size} bytes of {len(data)}; allowed: 1 or more, a part of them")
    count = len(data) // size
    if count < 2 or data.readonly or len(data) < LEAST or not has_library(SHA256):
        return b"".join([hashlib.sha256(data[at : at + size]).digest() for at in range(0, len(data), size)])
    found = ctypes.create_string_buffer(SHA256_BYTES * count)
    _function()(ctypes.addressof(ctypes.c_char.from_buffer(data)), count, size, ctypes.addressof(found))
    return found.raw


SHA256 = Compiled("SHA-256 of several parts", lambda: _function(), ())


@functools.cache
def _function() -> Callable[..., Any]:
    return cpp_library.function("sha256.cpp", {}, "te_sha256", _ARGUMENTS)
