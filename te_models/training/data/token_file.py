"""Token ids in a file, read through a descriptor: a file that shrinks while it is read is an error, not a signal.

Through a memory map, the first access beyond the new end of the file would end the process with SIGBUS.
"""

import os
import weakref
from pathlib import Path

import torch

from ...sizes import plural
from .errors import DataError

DTYPES: dict[str, torch.dtype] = {"uint16": torch.uint16, "uint32": torch.uint32}
"""How ids are stored, little endian."""
_STORED = DTYPES | {"uint8": torch.uint8, "int64": torch.int64}
"""How the files beside them are: marks of tokens, and the ends of documents."""


class TokenFile:
    """An open file of token ids. It stays the same file when another one takes its name.

    Args:
        dtype: A key of `DTYPES`, or "uint8", "int64".
        count: How many ids the file holds.
        vocab_size: Every id is below it.

    Raises:
        DataError: the file cannot be opened, is no regular file, or has another size.
    """

    def __init__(self, path: Path, dtype: str, count: int, vocab_size: int) -> None:
        self.path, self.dtype, self.count, self.vocab_size = path, dtype, count, vocab_size
        self.torch_dtype = _STORED[dtype]
        self._itemsize = self.torch_dtype.itemsize
        self._unit = "tokens" if dtype in DTYPES else "entries"
        size = path.stat().st_size if path.is_file() else 0  # opening a pipe would wait for a writer
        needed = count * self._itemsize
        if size != needed:
            raise DataError(f"{path} has {plural(size, 'byte')}, but {count} {self._unit} of {dtype} need {needed}")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._fd)

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return ids `start` to `start + count - 1` as int64 `[count]`.

        Raises DataError where the file no longer has them, or one is beyond the vocabulary.
        """
        data = self.read_bytes(start, count)
        ids = torch.frombuffer(data, dtype=self.torch_dtype).to(torch.int64)
        if int(ids.max()) >= self.vocab_size:
            where = int((ids >= self.vocab_size).nonzero()[0])
            raise DataError(
                f"{self.path} has the token id {int(ids[where])} at token {start + where}; "
                f"allowed: below its vocab_size, {self.vocab_size}"
            )
        return ids

    def read_bytes(self, start: int, count: int) -> bytearray:
        """Return the bytes of ids `start` to `start + count - 1`."""
        data = bytearray(count * self._itemsize)
        view, done, offset = memoryview(data), 0, start * self._itemsize
        while done < len(data):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise DataError(f"cannot read {self.path}: {error.strerror}") from None
            if got == 0:
                size = os.fstat(self._fd).st_size
                needed = self.count * self._itemsize
                raise DataError(f"{self.path} shrank to {size} bytes while it was read; its tokens need {needed}")
            done += got
        return data
