"""A checkpoint's parameters one by one, put together in memory, in either layout: for loading and for quantizing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import torch

from te_models.config import ModelConfig
from te_models.layers import QuantizedTensor

from .dtypes import torch_dtype
from .links import Namespace, compose
from .move import cut_pieces, fill_tensor
from .naming import ExpertLayout, expected_tensors
from .quantized_format import SUFFIXES, rebuild
from .store import Store
from .te_namespace import Formats, formats_in_layout, te_namespace
from .threads import cores, start_threads

MAX_THREADS = 4
"""Threads that compute with one parameter; each has working copies of a band of rows."""


class Parameters:
    """The parameters of `store`, whose tensors are as `source` says, under their names in `layout`.

    formats: grouped-layout names of quantized parameters.
    """

    def __init__(
        self, store: Store, source: Namespace, config: ModelConfig, formats: Formats, layout: ExpertLayout
    ) -> None:
        self.store = store
        self.shapes = expected_tensors(config, layout)
        self.formats = formats_in_layout(config, layout, formats)
        self._target = te_namespace(config, layout, formats)
        self._pieces = compose(source, self._target)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Threads to compute with the parameters; the same ones throughout, because each keeps memory for reuse."""
        return start_threads(min(cores(), MAX_THREADS))

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Copy a high-precision parameter into a plain tensor, part by part."""
        fill_tensor(self.store, self._pieces[name], out)

    def fill_range(self, name: str, axis: int, begin: int, end: int, out: torch.Tensor) -> None:
        """Copy indices begin .. end - 1 of a high-precision parameter along `axis` into a plain tensor."""
        fill_tensor(self.store, list(cut_pieces(self._pieces[name], axis, begin, end)), out)

    def part(self, entry: str, axis: int, begin: int, end: int) -> torch.Tensor:
        """Return indices begin .. end - 1 of a stored entry along `axis`, in its stored dtype."""
        shape = list(self._target.stored[entry].shape)
        axis %= len(shape)
        shape[axis] = end - begin
        out = torch.empty(shape, dtype=self.dtype(entry))
        fill_tensor(self.store, list(cut_pieces(self._pieces[entry], axis, begin, end)), out)
        return out

    def entry(self, entry: str) -> torch.Tensor:
        """Return a stored entry in its stored dtype."""
        out = torch.empty(self._target.stored[entry].shape, dtype=self.dtype(entry))
        self.fill(entry, out)
        return out

    def quantized(self, name: str) -> QuantizedTensor:
        """Return a quantized parameter, exactly as stored."""
        names = (name + suffix for suffix in SUFFIXES.values())
        entries = {entry: self.entry(entry) for entry in names if entry in self._pieces}
        return rebuild(name, entries, self.shapes[name], self.formats[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of an entry."""
        return torch_dtype(self.store.tensors[self._pieces[name][0].source].dtype)

    def members(self, name: str) -> Iterator[str]:
        """List the per-GEMM names of a grouped parameter."""
        return (f"{name}{g}" for g in range(self.shapes[name][0]))
