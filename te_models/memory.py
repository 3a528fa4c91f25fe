"""Give memory that was freed back to the system.

On CPU, tensors come from the C library's heap. A mixture of experts allocates other sizes in every step (each expert
gets other numbers of tokens), and a heap cannot return a free block that lies below a used one: training SmolLM2-135M
with four experts had 2.0 GiB in use while its resident set grew by 0.3 GiB in every step, without end. glibc's
`malloc_trim` returns such blocks too: called after every step it keeps the resident set flat, at no measurable time
(2.8 to 3.1 s a step with and without). Alternatives rejected: a fixed threshold from which allocations are mapped one
by one (flat as well, but 30-60 % slower steps, because every new map is zeroed); one arena; gradients that stay
allocated (both still grow).

Conversions call it for each parameter that they quantize as a whole: every thread has a separate heap, and that keeps
up to 64 MiB.

Weights that are read from files get large pages, where the system has them. The processor takes a fault for every page
of 4 KiB that a read touches first: a third of the time of a read from the page cache. And a decoded token reads every
weight once: from pages of 4 KiB the products of a token of SmolLM2-135M took 27.4 ms, and 20.6 from large ones, as
long as torch needs to add up as many bytes. A virtual machine that returns free memory to its host pays for large pages
when it first touches them: there the first load took 0.3 s longer.

A leaf module: it imports nothing of the project.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

_LARGE = 4 << 20
"""Bytes of a run of blocks from which on large pages are asked for."""
_LARGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # of Linux, on every processor; Python's mmap has no name for it
_GAP = 64 << 10
"""Bytes between two blocks of a run: the allocator's own, or freed."""
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def _c_function(name: str, *arguments: type) -> Callable[..., int] | None:
    """Return a function of the C library; None where it has none of that name."""
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = arguments
    return found  # type: ignore[no-any-return]


_TRIM = _c_function("malloc_trim", ctypes.c_size_t)  # of glibc: other C libraries have neither the call nor the need
_MADVISE = None if _ADVICE is None else _c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def reuse_freed_memory() -> None:
    """Let threads keep freed blocks of up to 31 MiB, up to 62 MiB each, for their next allocations.

    glibc decides by the largest block that it has unmapped so far what it maps block by block and from where on it
    trims a heap: at first 128 KiB, so that working copies of a few MiB, allocated again and again, are returned to the
    system and zeroed again each time (quantizing 1.2 GB to MXFP8: 350,000 page faults, a third of the processor time).
    """
    bytes(31 << 20)  # mapped and unmapped at once, and untouched: zeroed by the system (a bytearray writes the zeros)


def return_freed_memory() -> None:
    """Return the heap's free pages to the system, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)


def ask_for_large_pages(blocks: Iterable[tuple[int, int]]) -> None:
    """Have the system use large pages for memory that nothing has been written to, where it has them: (address, bytes)
    of each block.

    Blocks that lie one after another are asked for together, with what lies between them: a large page begins and ends
    at multiples of 2 MiB, and most weights of a small model are smaller than one. The C library has written its note of
    each block's size before the block, and where a small page lies the system does not make a large one at the next
    fault: these are collapsed here (Linux 6.1; earlier ones refuse, and such weights keep their small pages).
    """
    if _MADVISE is None or not _large_pages_allowed():
        return
    for begin, end in _runs(blocks):
        if end - begin < _LARGE:
            continue
        _MADVISE(begin, end - begin, _ADVICE)
        for place in range(-(-begin // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
            _MADVISE(place, _LARGE_PAGE, _MADV_COLLAPSE)  # refused where nothing is touched: the next fault makes one


@functools.cache
def _large_pages_allowed() -> bool:
    """Whether the system's administrator leaves large pages on: collapsing does not ask."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False


def _runs(blocks: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return [begin, end] in whole pages of what lies together."""
    page, found = mmap.PAGESIZE, list[list[int]]()
    for address, nbytes in sorted(blocks):
        begin, end = address // page * page, -(-(address + nbytes) // page) * page
        if found and begin - found[-1][1] <= _GAP:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found
