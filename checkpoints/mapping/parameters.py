"""A checkpoint's parameters one by one, put together in memory, in either layout: for loading and for quantizing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from te_models.config import ModelConfig
from te_models.lazy import torch

from ..io.boxes import Box
from ..io.dtypes import dtype_name, joint_dtype, torch_dtype
from ..io.header import TensorInfo, byte_count
from ..io.store import ComputedStore, Store
from .param_shapes import ExpertLayout, expected_tensors
from .quantized_format import SUFFIXES, quantizer_from_metadata, rebuild
from .rank_shards import Cuts, Ranges, RankPart, cut_shape
from .stream import cut_pieces, fill_tensor, read_piece
from .te_namespace import Formats, formats_in_layout, te_namespace
from .tensor_map import Namespace, Piece, compose

if TYPE_CHECKING:
    from te_models.layers import QuantizedTensor


class StoredParameters(ComputedStore):
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

    def pieces(self, entry: str) -> Sequence[Piece]:
        """Return the pieces of stored tensors that an entry is joined from; none where there is no such entry."""
        return self._pieces.get(entry, ())

    def fill_part(self, entry: str, cuts: Cuts, out: torch.Tensor) -> None:
        """Copy the ranges of a stored entry that `cuts` says into a plain tensor; nothing else is read."""
        self._fill(self._pieces[entry], list(cuts.items()), out)

    def _fill(self, pieces: Sequence[Piece], cuts: Sequence[tuple[int, Ranges]], out: torch.Tensor) -> None:
        if not cuts:
            fill_tensor(self.store, pieces, out)
            return
        (axis, ranges), *rest = cuts
        offset = 0
        for begin, end in ranges:
            inside = list(cut_pieces(pieces, axis, begin, end))
            self._fill(inside, rest, out.narrow(axis, offset, end - begin))
            offset += end - begin

    def part(self, entry: str, axis: int, begin: int, end: int) -> torch.Tensor:
        """Return indices begin .. end - 1 of a stored entry along `axis`, in its stored dtype; callers never write to
        it, for where it lies in memory as it is here it is no copy."""
        axis %= len(self._target.stored[entry].shape)
        pieces = list(cut_pieces(self._pieces[entry], axis, begin, end))
        if len(pieces) == 1:
            found = read_piece(self.store, pieces[0])
            if found.is_contiguous() and found.dtype == self.dtype(entry):
                return found
        return self.entry(entry, {axis: ((begin, end),)})

    def entry(self, entry: str, cuts: Cuts = MappingProxyType({})) -> torch.Tensor:
        """Return a stored entry in its stored dtype, or the ranges of it that `cuts` says."""
        out = torch.empty(cut_shape(self._target.stored[entry].shape, cuts), dtype=self.dtype(entry), device="cpu")
        self.fill_part(entry, cuts, out)
        return out

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:  # type: ignore[override]
        """Dtype and shape of every stored entry, as of a `Store`."""
        found = {name: (dtype_name(self.dtype(name)), spec.shape) for name, spec in self._target.stored.items()}
        return {name: TensorInfo(dtype, shape, 0, byte_count(dtype, shape)) for name, (dtype, shape) in found.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a region of a stored entry, in its stored dtype."""
        return self.entry(name, {axis: ((part.start, part.stop),) for axis, part in enumerate(box)})

    def quantized(self, name: str, part: RankPart = RankPart()) -> QuantizedTensor:  # noqa: B008 (frozen)
        """Return a quantized parameter, or a part of it, exactly as stored."""
        quantizer, _ = quantizer_from_metadata(name, self.formats[name])
        cuts = part.field_cuts(name, self.shapes[name], quantizer)
        entries = {name + SUFFIXES[field]: self.entry(name + SUFFIXES[field], its) for field, its in cuts.items()}
        return rebuild(name, entries, part.shape(self.shapes[name]), self.formats[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of an entry; one that holds the numbers of all where it is joined from several."""
        return torch_dtype(joint_dtype(self.dtype_names(name)))

    def dtype_names(self, name: str) -> set[str]:
        """Return the stored dtypes, by their safetensors names, of the parts that an entry is joined from."""
        return {self.store.tensors[piece.source].dtype for piece in self._pieces[name]}

    def members(self, name: str) -> Iterator[str]:
        """List the per-GEMM names of a grouped parameter."""
        return (f"{name}{g}" for g in range(self.shapes[name][0]))
