"""The bits of `random.random_bits`, inside kernels."""

# A kernel takes plain values for its constexpr parameters, which choose its branches; triton's types know neither.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_tile(
    key_ptr, stream, first_row, first_column, width, A: tl.constexpr, B: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return int32 bits [A, B] for the elements of a tile at (first_row, first_column) of rows of `width` elements.

    Four neighbours share a counter. ALIGNED: first_column and width are multiples of 4, so every four of a row do;
    otherwise each element draws all four words and keeps its own.
    """
    seed, step = tl.load(key_ptr), tl.load(key_ptr + 1)
    row = first_row + tl.arange(0, A).to(tl.int64)
    if ALIGNED:
        quad = row[:, None] * (width // 4) + (first_column // 4 + tl.arange(0, B // 4))[None, :]
    else:
        index = row[:, None] * width + (first_column + tl.arange(0, B))[None, :]
        quad = index >> 2
    c0 = (quad & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + (stream.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    if ALIGNED:
        bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (A, B))
    else:
        word = index & 3
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits.to(tl.int32, bitcast=True)
