"""Move the pieces of a plan: into buffers in output order for a writer, into a live tensor, or into a state dict."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from te_models.lazy import torch

from ..io.boxes import Box, Shape, element_count, extents, flat_interval, full, shift, slices
from ..io.buffers import Buffer, Ring, bytes_at
from ..io.dtypes import bit_width, check_converted, dtype_name, torch_dtype
from ..io.store import MemoryStore, Store
from .plan import ConversionPlan, OutputTensor
from .tensor_map import Piece

_UNREAD = 4
"""Pieces of computed tensors that may still be read, so that computing and hashing need not wait for each other."""

_AT_ONCE = 1 << 20
"""Elements that are read at once."""

_TRANSPOSED = 8 << 20
"""Elements of a transposed matrix that are read at once."""


def read_piece(store: Store, piece: Piece) -> torch.Tensor:
    """Return the piece's source elements, shaped like its place in the output; of memory, a view."""
    part = store.read(piece.source, piece.source_box)
    used = [axis for axis in piece.axes if axis is not None]
    dropped = [d for d in range(part.dim()) if d not in used]
    return part.permute((*used, *dropped)).reshape(extents(piece.box))


def _file_bytes(store: Store, piece: Piece) -> tuple[int, int] | None:
    """Return which bytes of its source tensor a piece is; None where they do not follow one another in a file."""
    info = store.tensors[piece.source]
    interval = flat_interval(piece.source_box, info.shape)
    if interval is None or piece.permutes or not store.can_read_bytes(piece.source):
        return None
    begin, end = (edge * (bit_width(info.dtype) or 0) // 8 for edge in interval)
    return begin, end


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """`nbytes` bytes of an output, from byte `begin` on, are the source tensor's from `source_begin` on."""

    source: str
    source_begin: int
    begin: int
    nbytes: int


def copied_bytes(store: Store, output: OutputTensor) -> Iterator[CopiedBytes]:
    """Yield what an output has of source tensors in files byte for byte: whatever else a piece is (converted, moved
    element by element, computed) is left out."""
    if output.compute is not None:
        return
    bits = bit_width(output.dtype) or 0
    for piece in output.pieces:
        place = flat_interval(piece.box, output.shape)
        found = _file_bytes(store, piece) if store.tensors[piece.source].dtype == output.dtype else None
        if place is not None and found is not None and place[0] * bits % 8 == 0:
            yield CopiedBytes(piece.source, found[0], place[0] * bits // 8, found[1] - found[0])


def read_rows(store: Store, field: OutputTensor, begin: int, end: int) -> torch.Tensor:
    """Return indices begin .. end - 1 along the first dimension of what a plan moves to an output; all of a scalar."""
    shape = (end - begin, *field.shape[1:]) if field.shape else ()
    pieces = list(cut_pieces(field.pieces, 0, begin, end)) if field.shape else field.pieces
    whole = len(pieces) == 1 and pieces[0].box == full(shape) and math.prod(shape) <= _AT_ONCE
    if whole and _file_bytes(store, pieces[0]) is None:  # computed where it is read, so not in another's memory
        return read_piece(store, pieces[0]).to(torch_dtype(field.dtype)).contiguous()
    band = torch.empty(shape, dtype=torch_dtype(field.dtype), device="cpu")
    fill_tensor(store, pieces, band)
    return band


def read_bands(store: Store, field: OutputTensor, limit: int, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows) of an output, from the first row to the last, of about `limit` elements each: a multiple
    of `multiple` rows, but for the last ones."""
    length = field.shape[0] if field.shape else 1
    rows = max(1, limit // max(1, math.prod(field.shape[1:])) // multiple) * multiple
    for begin in range(0, length, rows):
        yield begin, read_rows(store, field, begin, min(length, begin + rows))


def matrices(output: OutputTensor) -> list[OutputTensor]:
    """Return the matrices of a stack [G, out, in] as outputs of their own, [out, in]; a matrix is its only one."""
    if len(output.shape) == 2:
        return [output]

    def member(g: int) -> tuple[Piece, ...]:
        cut = cut_pieces(output.pieces, 0, g, g + 1)
        return tuple(replace(piece, box=piece.box[1:], axes=piece.axes[1:]) for piece in cut)

    return [replace(output, shape=output.shape[1:], pieces=member(g)) for g in range(output.shape[0])]


def split_piece(piece: Piece, limit: int) -> Iterator[Piece]:
    """Cut a piece along its output dimensions, in output order, into pieces of at most `limit` elements."""
    size = element_count(piece.box)
    if size <= limit:
        yield piece
        return
    d = next(d for d, r in enumerate(piece.box) if r.size > 1)
    n, axis = piece.box[d].size, piece.axes[d]
    assert axis is not None, "a dimension of more than one element comes from somewhere"
    rows = max(1, limit // (size // n))
    for begin in range(0, n, rows):
        end = min(n, begin + rows)
        box = _narrow(piece.box, d, begin, end)
        part = Piece(piece.source, _narrow(piece.source_box, axis, begin, end), box, piece.axes)
        yield from split_piece(part, limit)


def _narrow(box: Box, d: int, begin: int, end: int) -> Box:
    return (*box[:d], box[d].part(begin, end), *box[d + 1 :])


def cut_pieces(pieces: Sequence[Piece], d: int, begin: int, end: int) -> Iterator[Piece]:
    """Yield the parts of `pieces` that fill indices begin .. end - 1 of output dimension d, placed from index 0 on."""
    for piece in pieces:
        r, axis = piece.box[d], piece.axes[d]
        first, last = (min(r.size, max(0, -(-(edge - r.start) // r.step))) for edge in (begin, end))
        if first < last:
            box = shift(_narrow(piece.box, d, first, last), d, -begin)
            source_box = piece.source_box if axis is None else _narrow(piece.source_box, axis, first, last)
            yield Piece(piece.source, source_box, box, piece.axes)


def fill_tensor(
    store: Store, pieces: Sequence[Piece], out: torch.Tensor, limit: int = _AT_ONCE, *, checked: bool = False
) -> None:
    """Copy all pieces into `out`, converting to its dtype and device, `limit` elements at a time. checked: see
    `io/dtypes.py`."""
    for whole in pieces:
        if _read_in_place(store, whole, out):
            continue
        for piece, values in read_parts(store, whole, limit):
            part = out[slices(piece.box)]
            part.copy_(values)
            if checked:
                check_converted(part, values, piece.source)


def _read_in_place(store: Store, piece: Piece, out: torch.Tensor) -> bool:
    """Read a piece into its place where the file has the same bytes in the same order; False where it has not."""
    interval = _file_bytes(store, piece)
    if interval is None or type(out) not in (torch.Tensor, torch.nn.Parameter) or out.device.type != "cpu":
        return False
    part = out[slices(piece.box)]
    if dtype_name(part.dtype) != store.tensors[piece.source].dtype or not part.is_contiguous():
        return False
    if part.numel():
        store.read_into(piece.source, interval[0], bytes_at(part.data_ptr(), part.nbytes))
    return True


def read_parts(store: Store, piece: Piece, limit: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield parts of a piece of at most `limit` elements, in output order, each with its source elements.

    Of a transposed matrix in a file such a part is a few numbers of every row, so much larger parts are read at once.
    """
    at_once = max(limit, _TRANSPOSED) if piece.permutes and store.can_read_bytes(piece.source) else limit
    for whole in split_piece(piece, at_once):
        values = read_piece(store, whole)
        for part in split_piece(whole, limit):
            starts = [(r.start - w.start) // w.step for r, w in zip(part.box, whole.box)]
            yield part, values[tuple(slice(begin, begin + r.size) for begin, r in zip(starts, part.box))]


def stream_output(store: Store, output: OutputTensor, ring: Ring) -> Iterator[tuple[Buffer, int]]:
    """Yield the output's bytes in order as (buffer, byte count); the buffer is valid until the ring comes round."""
    if output.compute is not None:
        yield from _stream_computed(output.compute(), ring.nbytes)
        return
    ordered = _in_order(output.pieces, output.shape)
    if ordered is None:
        yield from _stream_blocks(store, output, ring)
        return
    for piece in ordered:
        yield from _stream_piece(store, piece, output.dtype, ring)


def _in_order(pieces: Sequence[Piece], shape: Shape) -> list[Piece] | None:
    placed = [(interval, piece) for piece in pieces if (interval := flat_interval(piece.box, shape)) is not None]
    if len(placed) < len(pieces):
        return None
    return [piece for _, piece in sorted(placed, key=lambda pair: pair[0])]


def _stream_piece(store: Store, piece: Piece, dtype: str, ring: Ring) -> Iterator[tuple[Buffer, int]]:
    interval = _file_bytes(store, piece) if store.tensors[piece.source].dtype == dtype else None
    if interval is not None:
        begin, end = interval
        for position in range(begin, end, ring.nbytes):
            buffer, n = ring.next(), min(ring.nbytes, end - position)
            store.read_into(piece.source, position, buffer.bytes[:n])
            yield buffer, n
        return
    itemsize = torch_dtype(dtype).itemsize
    for part, values in read_parts(store, piece, ring.nbytes // itemsize):
        buffer, n = ring.next(), element_count(part.box) * itemsize
        out = buffer.tensor[:n].view(torch_dtype(dtype)).view(extents(part.box))
        out.copy_(values)
        check_converted(out, values, part.source)
        del values
        yield buffer, n


def _stream_blocks(store: Store, output: OutputTensor, ring: Ring) -> Iterator[tuple[Buffer, int]]:
    """Stream an output whose pieces interleave, put together a block at a time."""
    dtype = torch_dtype(output.dtype)
    for pieces, shape in split_output(output.pieces, output.shape, ring.nbytes // dtype.itemsize):
        buffer, n = ring.next(), math.prod(shape) * dtype.itemsize
        fill_tensor(store, pieces, buffer.tensor[:n].view(dtype).view(shape), checked=True)
        yield buffer, n


def split_output(
    pieces: Sequence[Piece], shape: Shape, limit: int, d: int = 0
) -> Iterator[tuple[Sequence[Piece], Shape]]:
    """Cut an output from dimension `d` on into blocks of at most `limit` elements that follow one another in memory.

    Each comes as its pieces, placed in a tensor of the shape that comes with them.
    """
    if math.prod(shape) <= limit:
        yield pieces, shape
        return
    rows = limit // math.prod(shape[d + 1 :])
    for begin in range(0, shape[d], max(1, rows)):
        end = min(shape[d], begin + max(1, rows))
        part = (*shape[:d], end - begin, *shape[d + 1 :])
        yield from split_output(list(cut_pieces(pieces, d, begin, end)), part, limit, d + 1)


def _stream_computed(parts: Iterable[torch.Tensor], nbytes: int) -> Iterator[tuple[Buffer, int]]:
    """Stream tensors in pieces of `nbytes`, from the memory that they lie in; before the next one is asked for, all but
    a few pieces have been read and are free."""
    unread: deque[Buffer] = deque()
    for tensor in parts:
        raw = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        del tensor
        for begin in range(0, raw.numel(), nbytes):
            buffer = Buffer(raw[begin : begin + nbytes])
            yield buffer, len(buffer.bytes)
            unread.append(buffer)
        raw = buffer = None
        while len(unread) > _UNREAD:
            unread.popleft().wait()
    while unread:
        unread.popleft().wait()


def carry_out(plan: ConversionPlan, store: MemoryStore) -> dict[str, torch.Tensor]:
    """Return the outputs of a plan that moves tensors in memory.

    An output that is a whole tensor under another name, or a view of one, shares its memory; others are new, on the
    device of their first piece.
    """
    with torch.no_grad():
        return {output.name: _moved(store, output) for output in plan.outputs}


def _moved(store: MemoryStore, output: OutputTensor) -> torch.Tensor:
    dtype = torch_dtype(output.dtype)
    first = output.pieces[0]
    if len(output.pieces) == 1 and first.box == full(output.shape):
        return read_piece(store, first).to(dtype)
    out = torch.empty(output.shape, dtype=dtype, device=store.view(first.source).device)
    fill_tensor(store, output.pieces, out, limit=max(1, element_count(full(output.shape))))
    return out
