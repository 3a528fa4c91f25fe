"""Whether two folders hold the same model, bit for bit, whatever their kind, layout and sharding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from te_models.lazy import torch
from te_models.sizes import plural

from ..families import FAMILIES
from ..families.base.family import differing_fields, differing_values
from ..folder.checkpoint import Checkpoint, open_checkpoint
from ..folder.passthrough import our_names
from ..folder.provenance import differing_scales
from ..io.boxes import intersect
from ..io.buffers import Ring
from ..io.dtypes import FLOATS, bit_width, joint_dtype, torch_dtype
from ..io.errors import CheckpointError, shown_untrusted
from ..io.threads import Progress
from ..mapping.plan import OutputTensor, copy_of
from ..mapping.quantized_format import SUFFIXES
from ..mapping.stream import stream_output
from ..mapping.tensor_map import Piece, compose, identity_namespace
from .conversion import PathLike

P = TypeVar("P", "torch.Tensor", memoryview)
_SHOWN = 20
"""Differences that are printed."""
_EMBEDDING = "embedding.word_embeddings.weight"
_OF_TRAINING = frozenset(
    ("columnwise", "usage", "block", "two_dimensional", "with_2d_quantization", "with_rht", "stochastic_rounding")
)
"""What is said of a transpose, and of how rounding chose scales: no Hugging Face file says it."""


@dataclass
class VerifyReport:
    """The result: `equal`, the differences in words, and how much was compared."""

    equal: bool = True
    tensors: int = 0
    bytes: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, difference: str) -> None:
        """Record a difference."""
        self.equal = False
        self.differences.append(difference)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"equal": self.equal, "tensors": self.tensors, "bytes": self.bytes, "differences": self.differences}

    def __str__(self) -> str:
        if self.equal:
            return f"equal: {plural(self.tensors, 'tensor')}, {plural(self.bytes, 'byte')}"
        more = len(self.differences) - _SHOWN
        lines = self.differences[:_SHOWN] + ([f"... and {more} more (--json lists all)"] if more > 0 else [])
        return "\n".join(["different:", *(f"  {line}" for line in lines)])


def verify(a: PathLike, b: PathLike, *, progress: Progress | None = None) -> VerifyReport:
    """Compare two folders of either kind: model configuration, then every parameter, as in the grouped layout, and the
    tensors that travel along unused. A stored output layer that should repeat the embedding, and does not, differs.

    Quantized parameters are compared as stored (data and scales). Two Hugging Face folders of different files but equal
    content are equal; so are a Hugging Face folder and its import in either layout, and a folder of ours and its
    export: the transposes that ours has for training are in no Hugging Face file, and do not count. Scales of
    activations are compared where both folders have files of one format and form, now or before their import.
    """
    report = VerifyReport()
    with open_pair(a, b) as (left, right):
        for path, (mine, theirs) in differing_config(left, right).items():
            report.add(f"config: {path}: {shown_untrusted(mine)} and {shown_untrusted(theirs)}")
        for difference in differing_scales(left, right):
            report.add(difference)
        outputs_a, outputs_b = canonical_outputs(left), canonical_outputs(right)
        for outputs, copies in zip((outputs_a, outputs_b), output_layers(left, right)):
            outputs |= copies
        for name in (n for n in {**left.formats, **right.formats} if left.formats.get(n) != right.formats.get(n)):
            beside = left.kind != right.kind and _rowwise(left, name) == _rowwise(right, name)
            if not beside:
                report.add(f"{name}: {_format(left, name)} and {_format(right, name)}")
            for entry in (name + suffix for field, suffix in SUFFIXES.items() if not beside or "columnwise" in field):
                outputs_a.pop(entry, None)
                outputs_b.pop(entry, None)
        for name in {**outputs_a, **outputs_b}:
            if name not in outputs_a or name not in outputs_b:
                report.add(f"{name}: only in {a if name in outputs_a else b}")
        common = [name for name in outputs_a if name in outputs_b]
        total = sum(outputs_a[name].nbytes for name in common)
        rings = Ring(), Ring()
        for name in common:
            parts = _parts_of_other_dtypes(left, outputs_a[name].pieces, right, outputs_b[name].pieces)
            if parts is not None:
                report.add(f"{name}: {parts}")
            else:
                compare_bits(report, left, outputs_a[name], right, outputs_b[name], rings)
            report.tensors += 1
            report.bytes += outputs_a[name].nbytes
            if progress is not None:
                progress(report.bytes, total)
    return report


def differing_config(left: Checkpoint, right: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return the fields of the model configuration that differ -> both values. Between a folder of ours and a Hugging
    Face folder, what config.json has no word for does not differ, such as the tokens that a router loss compares."""
    found = differing_values(left.config.to_dict(), right.config.to_dict())
    if found and left.kind != right.kind:
        ours, hf = (left, right) if right.kind == "hf" else (right, left)
        family = FAMILIES[hf.family or ""]
        with suppress(CheckpointError):  # of a model that the family cannot express everything counts
            said = family.read_config(family.write_config(ours.config), mtp=hf.config.mtp_num_layers > 0)
            other = differing_fields(said.to_dict(), hf.config.to_dict())
            found = {path: values for path, values in found.items() if path in other}
    return found


def canonical_outputs(ckpt: Checkpoint) -> dict[str, OutputTensor]:
    """Return the grouped parameters and what travels along as outputs, in dtypes that hold the stored numbers."""
    target = identity_namespace(ckpt.namespace.canonical)
    outputs = {}
    for name, pieces in compose(ckpt.namespace, target).items():
        outputs[name] = OutputTensor(name, _joint_dtype(_dtypes(ckpt, pieces)), target.canonical[name], tuple(pieces))
    for name, copy in our_names(ckpt.passthrough).items():
        outputs[copy] = copy_of(ckpt.tensors[name], name, copy)
    return outputs


def _dtypes(ckpt: Checkpoint, pieces: Iterable[Piece]) -> set[str]:
    return {ckpt.tensors[piece.source].dtype for piece in pieces}


def _joint_dtype(found: set[str]) -> str:
    """Return the dtype that holds the numbers of all: rounded to another, different ones could be the same."""
    if len(found) == 1 or not found <= FLOATS:
        return min(found)
    return joint_dtype(found)


def _parts_of_other_dtypes(
    left: Checkpoint, a: tuple[Piece, ...], right: Checkpoint, b: tuple[Piece, ...]
) -> str | None:
    """Return which part of a parameter has another dtype in each folder, where one of them joins it from several."""
    if max(len(_dtypes(left, a)), len(_dtypes(right, b))) < 2:
        return None
    for x in a:
        for y in b:
            mine, theirs = left.tensors[x.source].dtype, right.tensors[y.source].dtype
            if mine != theirs and intersect(x.box, y.box) is not None:
                return f"{x.source} in {mine} and {y.source} in {theirs}"
    return None


def output_layers(left: Checkpoint, right: Checkpoint) -> tuple[dict[str, OutputTensor], dict[str, OutputTensor]]:
    """Return, for each tensor of either folder that should only repeat the tied embedding, what each of them has there:
    the stored tensor, or where it stores none, the embedding."""
    names = {**left.tied_copies, **right.tied_copies}
    tied = all(c.config.embedding.share_embeddings_and_output_weights for c in (left, right))
    if not names or not tied or any(_EMBEDDING in c.formats for c in (left, right)):
        return {}, {}
    return _output_layers(left, names), _output_layers(right, names)


def _output_layers(ckpt: Checkpoint, names: Iterable[str]) -> dict[str, OutputTensor]:
    embedding = canonical_outputs(ckpt)[_EMBEDDING]
    outputs = {}
    for name in names:
        outputs[name] = replace(embedding, name=name)
        if name in ckpt.tied_copies:
            original, copy = ckpt.tied_copies[name], ckpt.tensors[name]
            outputs[name] = copy_of(copy, name, name)
            if copy.shape == ckpt.tensors[original].shape:  # it lies in the files as the embedding does
                pieces = tuple(replace(piece, source=name) for piece in embedding.pieces)
                outputs[name] = OutputTensor(name, copy.dtype, embedding.shape, pieces)
    return outputs


def _format(ckpt: Checkpoint, name: str) -> str:
    return str(ckpt.formats[name]["quantizer"]) if name in ckpt.formats else "not quantized"


def _rowwise(ckpt: Checkpoint, name: str) -> dict[str, Any] | None:
    """Return what is said of a quantized parameter but for its transpose, and how it was rounded."""
    if name not in ckpt.formats:
        return None
    said = dict(ckpt.formats[name])
    said |= said.pop("quantizer")
    return {key: value for key, value in said.items() if key not in _OF_TRAINING}


def compare_bits(
    report: VerifyReport,
    left: Checkpoint,
    a: OutputTensor,
    right: Checkpoint,
    b: OutputTensor,
    rings: tuple[Ring, Ring],
) -> None:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        report.add(f"{a.name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        return
    position = 0
    pair = ((left, a, rings[0]), (right, b, rings[1]))
    parts = ((buffer.bytes[:n] for buffer, n in stream_output(c.store, o, ring)) for c, o, ring in pair)
    for x, y in equal_parts(*parts, size=len):
        if not same_bytes(x, y):
            report.add(f"{a.name}{_first_difference(a, x, y, position)}")
            return
        position += len(x)


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_bytes(x: memoryview, y: memoryview) -> bool:
    """Whether two parts of buffers, writable and of equal size, hold the same bytes. (Python compares memoryviews byte
    by byte, at a tenth of the speed.)"""
    addresses = (ctypes.addressof(ctypes.c_ubyte.from_buffer(part)) for part in (x, y))
    return len(x) == 0 or _libc.memcmp(*addresses, len(x)) == 0


def _first_difference(output: OutputTensor, x: memoryview, y: memoryview, position: int) -> str:
    """Return, in words, the first element that differs between parts of a tensor which begin at byte `position`."""
    first = next(i for i, (one, other) in enumerate(zip(x, y)) if one != other)
    width = (bit_width(output.dtype) or 8) // 8
    if width == 0:
        return f": byte {position + first} differs"
    element = first // width * width
    values = [
        torch.frombuffer(bytearray(part[element : element + width]), dtype=torch_dtype(output.dtype)).item()
        for part in (x, y)
    ]
    index, left = [], (position + element) // width
    for size in reversed(output.shape):
        left, i = divmod(left, size)
        index.insert(0, i)
    return f"{index}: {values[0]} and {values[1]}"


@contextmanager
def open_pair(a: PathLike, b: PathLike) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open two folders so that what differs in their files differs here.

    Quantized weights that no form of ours takes over are read as values, in the dtype of the other weights, as an
    import would store them. Of two folders that both have such weights they are read in float32: rounded, values of
    different scales can be the same.
    """
    with ExitStack() as stack:
        left, right = (stack.enter_context(open_checkpoint(path, verify=False)) for path in (a, b))
        if left.config.mtp_num_layers != right.config.mtp_num_layers:  # files alone do not say what is a parameter
            left, right = (
                stack.enter_context(open_checkpoint(c.path, mtp=True, verify=False))
                if c.kind == "hf" and other.config.mtp_num_layers
                else c
                for c, other in ((left, right), (right, left))
            )
        if all(c.quantized is not None and c.quantized.found.inexact for c in (left, right)):
            left, right = (
                stack.enter_context(
                    open_checkpoint(c.path, float32=True, mtp=bool(c.config.mtp_num_layers), verify=False)
                )
                for c in (left, right)
            )
        yield left, right


def equal_parts(a: Iterator[P], b: Iterator[P], size: Callable[[P], int]) -> Iterator[tuple[P, P]]:
    """Yield the same parts of two tensors of equal size, each of which comes in flat parts of its own sizes."""
    x = y = None
    while True:
        x = next(a, None) if x is None or size(x) == 0 else x
        y = next(b, None) if y is None or size(y) == 0 else y
        if x is None or y is None:
            assert x is y, "both have as many elements"
            return
        n = min(size(x), size(y))
        if n:
            yield x[:n], y[:n]
        x, y = x[n:], y[n:]
