"""SHA-256 of parts of equal size, several at once where the processor has instructions for it.

hashlib hashes one message at a time, which occupies a third of these instructions' throughput
(`kernels/cpp/sha256.cpp`). The library is compiled in the background once a process has hashed enough to be worth it,
and kept for all later processes; before, and without a compiler or the instructions, hashlib computes the same
digests.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Any

from te_models.child_process import renew_in_forks
from te_models.kernels import cpp_library

SHA256_BYTES = 32
LEAST = 1 << 30
"""Bytes of parts after which a process compiles the library, whose hashing took about as long as that takes."""

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def digests_of_each(data: memoryview, size: int) -> bytes:
    """Return the digests, SHA256_BYTES each, of as many parts of `size` bytes as `data` has; it has nothing else.

    data: contiguous. The interpreter lock is free meanwhile. ValueError for a size of which `data` is no multiple.
    """
    data = data.cast("B")
    if size < 1 or len(data) % size:
        raise ValueError(f"parts have {size} bytes of {len(data)}; allowed: 1 or more, a part of them")
    count = len(data) // size
    run = library.function(len(data)) if count > 1 and not data.readonly else None
    if run is None:
        return b"".join([hashlib.sha256(data[at : at + size]).digest() for at in range(0, len(data), size)])
    found = ctypes.create_string_buffer(SHA256_BYTES * count)
    run(ctypes.addressof(ctypes.c_char.from_buffer(data)), count, size, ctypes.addressof(found))
    return found.raw


class Library:
    """The compiled function, once there is one."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self._function: Callable[..., Any] | None = None
        self._started = False

    def function(self, nbytes: int) -> Callable[..., Any] | None:
        """Return the function, or None while hashlib is to hash these bytes."""
        if self._function is not None or self._started:
            return self._function
        with self._lock:
            self._bytes += nbytes
            if self._started or not (self._bytes > LEAST or _is_cached()):
                return self._function
            self._started = True
        if _is_cached():
            self.compile()
        else:
            threading.Thread(target=self.compile, name="compile sha256").start()
        return self._function

    def compile(self) -> None:
        """Compile the library, or load it; hashlib stays where that cannot be done."""
        with contextlib.suppress(cpp_library.CompilationError):
            self._function = cpp_library.function("sha256.cpp", {}, "te_sha256", _ARGUMENTS)


@functools.cache
def _is_cached() -> bool:
    """Whether a process of this machine has compiled the library before."""
    return cpp_library.is_cached("sha256.cpp", {})


library = Library()
renew_in_forks(library._lock)
