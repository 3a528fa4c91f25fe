"""A region of a tensor in a file, read through the file's descriptor.

A memory map would be simpler, but a page of it beyond the end of a file that became shorter kills the process
(SIGBUS) where a read returns fewer bytes, of which an error can be made. What lies together is read by one call; a
region of rows that lie apart by one call per row, unless they are so short or so close that reading what lies between
them costs less.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable

from te_models.lazy import torch

from .boxes import Box, Range, Shape, element_count, extents, flat_interval

ReadBytes = Callable[[int, memoryview], None]
"""Fills a memoryview with the tensor's bytes from the given one on."""

_CLOSE = 4
"""Rows that lie apart are read at once, together with what is between them, if that reads at most this many times as
much."""

_SMALL = 64 << 10
"""Bytes that are read at once, however little of them is asked for."""


def read_box(read: ReadBytes, shape: Shape, dtype: torch.dtype, box: Box) -> torch.Tensor:
    """Return a region of a row-major tensor of this shape as a new tensor, which may be strided."""
    if element_count(box) == 0 or flat_interval(box, shape) is not None:
        begin = _offset([r.start for r in box], shape) if element_count(box) else 0
        return _read(read, begin, extents(box), dtype)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = [r.start + (r.size - 1) * r.step for r in box]
    begin, end = _offset([r.start for r in box], shape), _offset(last, shape) + 1
    nbytes = (end - begin) * dtype.itemsize
    if nbytes <= max(_SMALL, _CLOSE * element_count(box) * dtype.itemsize):
        span = _read(read, begin, (end - begin,), dtype)
        return span.as_strided(extents(box), [stride * r.step for stride, r in zip(strides, box)])
    inner = len(shape)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1], 1):
        inner -= 1
    row = inner - 1  # the last dimension of which not all is asked for
    apart = box[row].step > 1 and strides[row] * dtype.itemsize > _SMALL // _CLOSE
    outer = box[:inner] if apart else box[:row]
    width = 1 if apart else (box[row].size - 1) * box[row].step + 1
    out = torch.empty((*extents(outer), width, *shape[inner:]), dtype=dtype, device="cpu")
    run, data = width * strides[row] * dtype.itemsize, bytes_of(out)
    first = 0 if apart else box[row].start
    for number, index in enumerate(itertools.product(*(range(*r) for r in outer))):
        start = sum(i * stride for i, stride in zip(index, strides)) + first * strides[row]
        read(start * dtype.itemsize, data[number * run : (number + 1) * run])
    if apart:
        return out.squeeze(len(outer))
    return out[(slice(None),) * len(outer) + (slice(None, None, box[row].step),)]


def cut_rows(shape: Shape, limit: int) -> list[Box]:
    """Return the boxes that cut a tensor, along its first dimension, into parts of about `limit` elements each."""
    whole = tuple(Range(0, n) for n in shape)
    if not shape:
        return [whole]
    step = max(1, limit // max(1, math.prod(shape[1:])))
    return [(Range(begin, min(shape[0], begin + step)), *whole[1:]) for begin in range(0, shape[0], step)]


def _offset(index: list[int], shape: Shape) -> int:
    position = 0
    for i, n in zip(index, shape):
        position = position * n + i
    return position


def _read(read: ReadBytes, begin: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if out.numel():
        read(begin * dtype.itemsize, bytes_of(out))
    return out


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which has to outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
