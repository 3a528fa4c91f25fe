"""The digest of a tensor: SHA-256 of the digests of its parts, so that several threads hash at once.

A part is `ROWS_PER_PART` rows. Rows are what conversions move, so a part that moves into another tensor, as the rows of
one head out of a joined parameter do, has the same digest there and need not be hashed again; and of one long tensor as
of many short ones the parts are spread over threads, as SHA-256 of all its bytes could not be.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from .boxes import Shape
from .dtypes import bit_width
from .header import byte_count
from .sha256 import SHA256_BYTES, digests_of_each

ROWS_PER_PART = 64
"""Divides the rows of most attention heads (64, 128), MLPs and experts, as conversions split and join these."""

LEAST_PART_BYTES = 4096
"""Smaller parts would take longer to count than to hash: a tensor that has them is hashed as one."""

_THREADS = 2
"""For one file. SHA-256 of one thread is slower than what a file system reads and writes meanwhile."""


def part_bytes(dtype: str, shape: Shape, rows_per_part: int) -> int:
    """Return how many bytes of a tensor each digest covers of which its digest is made; the last part, perhaps the only
    one, can be shorter.

    A row has all elements of the last dimension. The part is the whole tensor where that has one dimension, where a
    part would be smaller than `LEAST_PART_BYTES`, and for rows_per_part 0 (earlier releases).
    """
    size = rows_per_part * shape[-1] * (bit_width(dtype) or 0) // 8 if len(shape) > 1 else 0
    return size if size >= LEAST_PART_BYTES else byte_count(dtype, shape)


def part_count(nbytes: int, size: int) -> int:
    """Return how many parts of `size` bytes a tensor has; one without elements has one."""
    return max(1, -(-nbytes // max(1, size)))


def digest_of_parts(parts: bytes | bytearray) -> str:
    """Return the digest of a tensor from the digests of its parts, `SHA256_BYTES` each: the only part's, or
    SHA-256 of them all in hexadecimal digits, with a newline after each."""
    if len(parts) == SHA256_BYTES:
        return parts.hex()
    text = hashlib.sha256()
    for begin in range(0, len(parts), SHA256_BYTES):
        text.update(b"%s\n" % parts[begin : begin + SHA256_BYTES].hex().encode())
    return text.hexdigest()


class HashThreads:
    """Threads that hash; what is submitted to the same one is done in order."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, "sha256") for _ in range(_THREADS)]
        self._bytes = [0] * _THREADS  # that each was chosen for

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown()

    def choose(self, nbytes: int) -> ThreadPoolExecutor:
        """Return the thread that has had the least to hash, for `nbytes` more."""
        number = self._bytes.index(min(self._bytes))
        self._bytes[number] += nbytes
        return self._threads[number]

    def wait(self) -> None:
        """Wait until all that was submitted is done."""
        for running in [thread.submit(lambda: None) for thread in self._threads]:
            running.result()


class TensorHash:
    """The digest of one tensor while its bytes pass in order, cut anywhere; one thread at a time brings them.

    digest: in hexadecimal digits, once the last byte has been hashed; empty before.
    """

    def __init__(
        self,
        dtype: str,
        shape: Shape,
        rows_per_part: int,
        *,
        threads: HashThreads | None = None,
        then: Callable[[bytes], None] | None = None,
    ) -> None:
        """threads: hash the bytes; None: the caller's does. then: called with the digests of all parts, `SHA256_BYTES`
        each, by the thread that hashed the last of them."""
        self.digest = ""
        self._nbytes, self._size = byte_count(dtype, shape), part_bytes(dtype, shape, rows_per_part) or 1
        self._threads, self._then = threads, then
        self._missing = part_count(self._nbytes, self._size)
        self._parts, self._lock = bytearray(SHA256_BYTES * self._missing), threading.Lock()
        self._next = 0  # the part that begins next; the one before it lacks `_left` bytes, is in `_open`, on `_thread`
        self._left, self._open = 0, hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        if not self._nbytes:
            self._hash(0, memoryview(b""), memoryview(b""), self._open, ends=True)

    def update(self, data: memoryview) -> Iterable[Future[None]]:
        """Take bytes; return the work that reads them."""
        work: list[Future[None]] = []
        rest, data = data[: self._left], data[self._left :]
        if rest:
            self._left -= len(rest)
            work += self._submit(self._next - 1, memoryview(b""), rest, ends=not self._left)
        if data:
            first, whole = self._next, len(data) // self._size
            self._next += whole
            tail, size = data[whole * self._size :], min(self._size, self._nbytes - self._next * self._size)
            if tail:
                self._next, self._left, self._open = self._next + 1, size - len(tail), hashlib.sha256()
            if self._threads is not None:  # a part stays with the thread on which it begins
                self._thread = self._threads.choose(len(data) + self._left)
            work += self._submit(first, data[: whole * self._size], tail, ends=bool(tail) and not self._left)
        return work

    def _submit(self, first: int, whole: memoryview, tail: memoryview, *, ends: bool) -> Iterable[Future[None]]:
        if self._thread is None:
            self._hash(first, whole, tail, self._open, ends=ends)
            return ()
        return (self._thread.submit(self._hash, first, whole, tail, self._open, ends=ends),)

    def _hash(self, first: int, whole: memoryview, tail: memoryview, opened: hashlib._Hash, *, ends: bool) -> None:
        """Hash parts from number `first` on, all of them in `whole`, and bytes of the one after them; ends: its last
        ones."""
        size = self._size
        digests = digests_of_each(whole, size)
        if tail:
            opened.update(tail)
        if ends:
            digests += opened.digest()
        if not digests:
            return
        with self._lock:
            self._parts[SHA256_BYTES * first : SHA256_BYTES * first + len(digests)] = digests
            self._missing -= len(digests) // SHA256_BYTES
            last = not self._missing
        if last:
            if self._then is not None:
                self._then(bytes(self._parts))
            self.digest = digest_of_parts(self._parts)
            self._parts = bytearray()
