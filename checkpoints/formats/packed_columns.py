"""Weights packed along their columns, as GPTQ and AWQ store them, seen as rows like every other format's, and back.

    GPTQ    X.qweight I32 [K/8, M]    X.qzeros I32 [K/group, M/8]    X.scales F16 [K/group, M]    X.g_idx I32 [K]
    AWQ     X.qweight I32 [K, M/8]    X.qzeros I32 [K/group, M/8]    X.scales F16 [K/group, M]

(M rows out, K columns in, four bits; eight have four codes in a word.) GPTQ's zero points are stored less one, but in
its second version (`checkpoint_format` "gptq_v2"). A word of AWQ has the codes 0, 2, 4, 6, 1, 3, 5, 7 of its eight from
the lowest bits on. What is seen of X.weight is `weight_packed` I32 [M, K/8], `weight_scale` [M, K/group],
`weight_zero_point` U8 [M, K/group] and `weight_g_idx` [K].
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..io.boxes import Box, Range, Shape
from ..io.dtypes import torch_dtype
from ..io.errors import CheckpointError
from ..io.header import TensorInfo
from ..io.store import FilesSeen, FileStore
from ..mapping.plan import OutputTensor
from .format import CodePacking, MixedFormat, WeightFormat

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_SEEN = {"qweight": "_packed", "qzeros": "_zero_point", "scales": "_scale", "g_idx": "_g_idx"}
"""A module's tensor -> what its name as one of a weight adds to the weight's."""


def gptq(bits: int, *, second: bool) -> CodePacking:
    """Return GPTQ's packing, or that of its second version."""
    return CodePacking(bits, tuple(range(32 // bits)), True, 0 if second else 1)


AWQ = CodePacking(4, _AWQ, False)


def unpack_columns(words: Tensor, packing: CodePacking) -> Tensor:
    """Return the codes [.., C] of words [.., C / per_word], uint8."""
    shifts = torch.zeros(packing.per_word, dtype=torch.int32, device="cpu")
    shifts[list(packing.order)] = torch.arange(0, 32, packing.bits, dtype=torch.int32, device="cpu")
    codes = (words[..., None] >> shifts) & (2**packing.bits - 1)
    return codes.to(torch.uint8).flatten(-2)


def pack_columns(codes: Tensor, packing: CodePacking) -> Tensor:
    """Undo `unpack_columns`."""
    shifts = torch.zeros(packing.per_word, dtype=torch.int64, device="cpu")
    shifts[list(packing.order)] = torch.arange(0, 32, packing.bits, device="cpu")
    return (codes.long().unflatten(-1, (-1, packing.per_word)) << shifts).sum(-1).to(torch.int32)


def seen_by_rows(files: FileStore, declared: WeightFormat | MixedFormat) -> FileStore:
    """Return the files with packed columns as rows, under the names of parts of weights."""
    packing = next((form.packing for form in declared.formats if form.packing is not None), None)
    if packing is None:
        return files
    seen: dict[str, str] = {}
    for name in files.tensors:
        module, _, kind = name.rpartition(".")
        if kind in _SEEN and f"{module}.qweight" in files.tensors:
            seen[f"{module}.weight{_SEEN[kind]}"] = name
    return _Rows(files, seen, packing) if seen else files


class _Rows(FilesSeen):
    """Files of which some tensors are seen as rows: `names` gives the file's name of each."""

    def __init__(self, files: FileStore, names: Mapping[str, str], packing: CodePacking) -> None:
        self._packing = packing
        super().__init__(files, {n: (its, *self._seen_as(its, files.tensors[its])) for n, its in names.items()})

    def _seen_as(self, source: str, info: TensorInfo) -> tuple[str, Shape]:
        kind, p = source.rpartition(".")[2], self._packing
        if kind == "g_idx":
            return info.dtype, info.shape
        if len(info.shape) != 2 or (kind != "scales" and info.dtype != "I32"):
            raise CheckpointError(f"{source!r} is {info.dtype} {list(info.shape)}; allowed: a matrix of I32 words")
        first, second = info.shape
        if kind == "scales":
            return info.dtype, (second, first)
        if kind == "qzeros":
            return "U8", (second * p.per_word, first)
        return "I32", (second, first) if p.along_rows else (second * p.per_word, first // p.per_word)

    def compute(self, name: str, box: Box) -> Tensor:
        source, p = self._seen[name][0], self._packing
        kind = source.rpartition(".")[2]
        if kind == "g_idx":
            return self._files.read(source, box)
        rows, columns = box
        if kind == "scales" or (kind == "qweight" and p.along_rows):
            return self._files.read(source, (columns, rows)).mT
        # a word has codes of several rows: read the words around them
        first, last = rows.start // p.per_word, -(-rows.stop // p.per_word)
        inner = columns if kind == "qzeros" else Range(columns.start * p.per_word, columns.stop * p.per_word)
        codes = unpack_columns(self._files.read(source, (inner, Range(first, last))), p).mT
        begin = first * p.per_word
        codes = codes[rows.start - begin : rows.stop - begin : rows.step]
        if kind == "qzeros":
            return codes + p.less  # to 16 of four bits
        in_order = CodePacking(p.bits, tuple(range(p.per_word)), True)
        return pack_columns(codes.contiguous(), in_order)


def column_name(weight: str, part: str) -> str:
    """Return what files call the part of a weight that is seen as `part`."""
    kinds = {f"{weight}{suffix}": kind for kind, suffix in _SEEN.items()}
    return f"{weight.removesuffix('.weight')}.{kinds[part]}"


def as_columns(
    weight: str, packing: CodePacking, outputs: list[OutputTensor], parts: Callable[[OutputTensor], Iterable[Tensor]]
) -> list[OutputTensor]:
    """Return the tensors of a weight, made as rows, as they are written: packed along columns.

    parts: computes an output, in parts along its first dimension.
    """
    found = []
    for output in outputs:
        name = column_name(weight, output.name)
        kind = name.rpartition(".")[2]
        dtype, shape = _written_as(kind, output, packing)
        compute = functools.partial(_columns, kind, output, packing, parts)
        found.append(OutputTensor(name, dtype, shape, output.pieces, compute, f"{output.variant} packed", output.owner))
    return found


def _written_as(kind: str, output: OutputTensor, p: CodePacking) -> tuple[str, Shape]:
    if kind == "g_idx":
        return output.dtype, output.shape
    rows, columns = output.shape
    if kind == "scales":
        return output.dtype, (columns, rows)
    if kind == "qzeros":
        return "I32", (columns, rows // p.per_word)
    return "I32", (columns, rows) if p.along_rows else (columns * p.per_word, rows // p.per_word)


def _columns(
    kind: str, output: OutputTensor, p: CodePacking, parts: Callable[[OutputTensor], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Yield a tensor packed along columns; the matrix is put together first."""
    flat = torch.cat([part.contiguous().view(-1).view(torch_dtype(output.dtype)) for part in parts(output)])
    rows = flat.view(output.shape)
    if kind == "g_idx":
        yield rows
    elif kind == "scales" or (kind == "qweight" and p.along_rows):
        yield rows.mT.contiguous()
    elif kind == "qzeros":
        yield pack_columns(((rows.int() - p.less) & (2**p.bits - 1)).mT, p)
    else:
        in_order = CodePacking(p.bits, tuple(range(p.per_word)), True)
        yield pack_columns(unpack_columns(rows, in_order).mT, p)
