"""A digest that tells one token data set from another, cheap enough to be checked at every start.

SHA-256 of the dtype, the number of tokens, the vocabulary and the stored bytes: of all bytes up to 64 MiB, above that
of 1024 blocks of 64 KiB spread evenly from the first byte to the last. The digest is in meta.json from when the data
set is built, and in every checkpoint of a run.
"""

import hashlib
from collections.abc import Iterator

import torch

from .token_file import TokenFile

BLOCKS, BLOCK = 1024, 64 << 10


def data_digest(tokens: TokenFile) -> str:
    """Return the digest of a data set as 64 hexadecimal digits.

    Raises DataError if the file shrinks meanwhile, or an id in what is read is beyond the vocabulary.
    """
    digest = hashlib.sha256(f"{tokens.dtype} {tokens.count} {tokens.vocab_size}\n".encode())
    dtype = tokens.torch_dtype
    for start, count in _blocks(tokens.count, dtype.itemsize):
        data = tokens.read_bytes(start, count)
        digest.update(data)
        ids = torch.frombuffer(data, dtype=dtype).to(torch.int64)  # torch has no maximum of unsigned numbers
        if int(ids.max()) >= tokens.vocab_size:
            tokens.read(start, count)  # says which one
    return digest.hexdigest()


def _blocks(count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, number of tokens) of what the digest covers."""
    size = BLOCK // itemsize
    if count <= BLOCKS * size:
        for start in range(0, count, size):
            yield start, min(size, count - start)
        return
    for i in range(BLOCKS):
        yield i * (count - size) // (BLOCKS - 1), size
