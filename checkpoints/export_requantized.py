"""Weights of an export that are quantized anew from the values of our storage, each tensor of the files by itself, but
for the number of a matrix, which is that of all tensors that one parameter joins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor

import torch

from .boxes import Shape
from .conversion_report import Measure
from .dtypes import dtype_name
from .formats import WeightFormat, encode
from .formats.format import Part
from .joined_amaxes import JoinedAmaxes, Key
from .links import Piece
from .move import cut_pieces, fill_tensor
from .plan import Output
from .quantized_format import SUFFIXES
from .quantized_outputs import field_makers
from .store import Store


def requantized_outputs(
    store: Store,
    weight_format: WeightFormat,
    weight: Output,
    part_shape: Callable[[Part, Shape], Shape],
    threads: Callable[[], Executor],
    measure: Measure,
    joined: JoinedAmaxes,
    keys: Sequence[Key],
) -> list[Output]:
    """Return the parts of one weight in a format.

    Arguments:
        store: what the pieces of `weight` read: values in float32.
        weight: the plain tensor, [out, in] or [E, out, in], that a plan would write.
        part_shape: returns the shape in which a part of a weight is written, see `Encoder.shape`.
        threads: returns those that share the work.
        measure: gets the largest error of each matrix.
        joined: where the parts of a parameter's matrices meet; keys: of which each matrix of `weight` is a part.
    """
    matrices: Sequence[Sequence[Piece]] = [weight.pieces]
    if len(weight.shape) == 3:
        matrices = [list(cut_pieces(weight.pieces, 0, g, g + 1)) for g in range(weight.shape[0])]
    readers = [functools.partial(_rows, store, pieces, len(weight.shape), weight.shape[-1]) for pieces in matrices]
    quantizer = weight_format.quantizer
    amaxes = [joined.add(key, weight.shape[-2:], read) for key, read in zip(keys, readers, strict=True)]
    makers = field_makers(weight.shape, quantizer, readers, threads, measure, amaxes)
    outputs = []
    for part in weight_format.parts:
        shape = part_shape(part, weight.shape)
        name, dtype = weight.name + part.suffix, part.dtypes[0]
        make = makers[SUFFIXES[f"rowwise_{part.field}"]]
        compute = functools.partial(_part, make, part, weight_format.element, dtype, name)
        variant = f"{weight_format.name} anew {quantizer!r}"
        outputs.append(Output(name, dtype, shape, weight.pieces, compute, variant, owner=weight.name))
    return outputs


def _rows(store: Store, pieces: Sequence[Piece], rank: int, columns: int, begin: int, end: int) -> torch.Tensor:
    """Return rows of a matrix; of one in a stack, the pieces are of a stack of one."""
    out = torch.empty((1,) * (rank - 2) + (end - begin, columns))
    fill_tensor(store, list(cut_pieces(pieces, rank - 2, begin, end)), out)
    return out if rank == 2 else out[0]


def _part(
    make: Callable[[], Iterable[torch.Tensor]], part: Part, element: str, dtype: str, name: str
) -> Iterator[torch.Tensor]:
    for field in make():
        convert = encode.encoder(part, element, dtype_name(field.dtype), dtype, name, None)
        yield field if convert is None else convert(field)
