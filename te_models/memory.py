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

Weights that are read from files get large pages, where the system has them: the processor takes a fault for every page
of 4 KiB that a read touches first: half of the time of a read from the page cache.

A leaf module: it imports nothing of the project.
"""

import ctypes
import mmap
from collections.abc import Callable

_LARGE = 4 << 20
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


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """Have the system use large pages for memory that nothing has been written to, from 4 MiB on, where it has them."""
    if _MADVISE is not None and nbytes >= _LARGE:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _MADVISE(begin, (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE, _ADVICE)
