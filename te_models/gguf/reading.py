"""A GGUF file as the tensors of a family's files, read and dequantized a region at a time; and its import."""

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from te_models.checkpoints.families import FAMILIES
from te_models.checkpoints.folder.provenance import provenance_source
from te_models.checkpoints.folder.te_plan import plan_te_folder
from te_models.checkpoints.io.boxes import Box, Range, Shape, slices
from te_models.checkpoints.io.dtypes import as_torch_dtype
from te_models.checkpoints.io.errors import CheckpointError
from te_models.checkpoints.io.header import TensorInfo, byte_count
from te_models.checkpoints.io.store import FileStore
from te_models.checkpoints.mapping.param_shapes import ExpertLayout, check_layout
from te_models.checkpoints.mapping.plan import ConversionPlan
from te_models.checkpoints.mapping.report import moved_report
from te_models.checkpoints.tools.conversion import Conversion, ConversionKeywords, PathLike

from ..extras import require
from .architectures import TensorPlace, gguf_hf_config, places
from .tokenizer import add_space, split_as_named

_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFStore(FileStore):
    """The tensors of one GGUF file under a family's names, with `config`, its config.json.

    Blocks are dequantized to float32 by the package `gguf`, in whole rows. ValueErrors of that package, for a damaged
    file, become CheckpointErrors.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = require("gguf", "gguf", feature=f"reading {path.name}")
        try:
            reader = self._gguf.GGUFReader(str(path))
            self.fields = {name: field.contents() for name, field in reader.fields.items()}
            entries = {entry.name: entry for entry in reader.tensors}
            header = reader.data[: reader.data_offset].tobytes() if hasattr(reader, "data_offset") else b""
        except CheckpointError:
            raise
        except Exception as error:  # the package reads a damaged file until something fails
            raise CheckpointError(f"{path} is no GGUF file that can be read: {str(error)[:120]}") from None
        if reader.byte_order != "I":
            raise CheckpointError(f"{path} is a big-endian GGUF file, which is not read")
        if self.fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {self.fields['split.count']} parts; merge them with llama-gguf-split"
            )
        self.config = gguf_hf_config(self.fields, entries, str(path))
        size = path.stat().st_size
        for entry in entries.values():
            if entry.data_offset + entry.n_bytes > size:
                raise CheckpointError(f"{path} ends within its tensor {entry.name!r}")
        self._entries = {
            name: (entry.tensor_type, tuple(reversed(entry.shape.tolist())), entry.data_offset)
            for name, entry in entries.items()
        }
        del reader, entries  # and the map of the file with them
        self._path, self._fds, self._opening = path, dict[str, int](), threading.Lock()
        self._guard, self._elements = None, None
        self.paths = {path.name: path}
        self.metadata, self.header_digests = {path.name: {}}, {path.name: hashlib.sha256(header).hexdigest()}
        self.kinds: dict[str, str] = {}
        self.tensors, self.file_of = {}, {}
        self._places: dict[str, TensorPlace] = {}
        self._name_tensors(str(path))

    def _name_tensors(self, where: str) -> None:
        family = FAMILIES[self.config["model_type"]]
        namespace = family.namespace(family.read_config(self.config), None)
        arch = self.fields["general.architecture"]
        found = places(namespace.stored, arch, self.config, self._gguf)
        for name, place in found.items():
            if place.name not in self._entries:
                continue  # named when the tensors are matched
            kind, shape, _ = self._entries[place.name]
            shape = shape if place.expert is None else shape[1:]
            expected = namespace.stored[name].shape
            if shape != expected and [n for n in shape if n > 1] == [n for n in expected if n > 1]:
                shape = expected
            plain = kind.name in _PLAIN and not place.plus_one
            dtype = _PLAIN[kind.name] if plain else "F32"
            self.tensors[name] = TensorInfo(dtype, shape, 0, byte_count(dtype, shape))
            self.file_of[name], self._places[name] = self._path.name, place
            if kind.name not in _PLAIN:
                self.kinds[name] = f"gguf {kind.name.lower()}"
        used = {place.name for place in found.values()}
        unused = [name for name in self._entries if name not in used and name != _ROPE_FACTORS]
        if unused:
            raise CheckpointError(f"{where} has a tensor {unused[0]!r} that {arch} models here do not have")
        if _ROPE_FACTORS in self._entries:
            factors = self._rows(_ROPE_FACTORS, 0, 1)
            if not (factors == 1).all():
                self.config["rope_parameters"] |= _llama3(factors.flatten(), self.config, where)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _bytes(self, begin: int, count: int) -> bytearray:
        with self._opening:
            if "" not in self._fds:
                self._fds[""] = os.open(self._path, os.O_RDONLY)
        data, done = bytearray(count), 0
        while done < count:
            n = os.preadv(self._fds[""], [memoryview(data)[done:]], begin + done)
            if n == 0:
                raise CheckpointError(f"{self._path} became shorter while it was read")
            done += n
        return data

    def _rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return rows of a tensor, whose leading dimensions count as rows: [end - begin, columns]."""
        kind, shape, offset = self._entries[name]
        columns = shape[-1]
        block, width = self._gguf.GGML_QUANT_SIZES[kind]
        row = columns // block * width
        data = self._bytes(offset + begin * row, (end - begin) * row)
        if kind.name in _PLAIN:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}[
                kind.name
            ]
            return torch.frombuffer(data, dtype=dtype).view(-1, columns)
        import numpy

        raw = numpy.frombuffer(data, dtype=numpy.uint8).reshape(end - begin, row)
        try:
            values = self._gguf.dequantize(raw, kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{name!r} of {self._path} has blocks of {kind.name}, which gguf does not read"
            ) from None
        return torch.from_numpy(values.astype(numpy.float32, copy=False).copy()).view(-1, columns)

    def read(self, name: str, box: Box) -> torch.Tensor:
        place, shape = self._places[name], self.tensors[name].shape
        if len(shape) == 1 or shape[0] == 1:
            values = self._rows(place.name, 0, 1).view(shape)
            if place.heads:
                values = _halves(values.view(-1, 1), place.heads).view(shape)
            return (values.float() - 1 if place.plus_one else values)[slices(box)]
        rows, columns = box
        first = (place.expert or 0) * shape[0]
        size = shape[0] // place.heads if place.heads else 1
        begin, end = rows.start // size * size, -(-rows.stop // size) * size
        values = self._rows(place.name, first + begin, first + end)
        if place.heads:
            values = _halves(values, (end - begin) // size)
        return values[slices((Range(rows.start - begin, rows.stop - begin, rows.step), columns))]

    def can_read_bytes(self, name: str) -> bool:
        return False


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from (0, D/2, 1, D/2 + 1, ...) to (0, 1, 2, ...)."""
    size: Shape = (heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return rows.view(size).transpose(1, 2).reshape(rows.shape)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Return what llama.cpp divides the frequencies by for the context extension "llama3", [head_dim / 2]."""
    theta, factor = float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    length = 2 * torch.pi / frequencies
    smooth = ((original / length - low) / (high - low)).clamp(0, 1)
    found = 1 / ((1 - smooth) / factor + smooth)
    return found.float()


def _llama3(factors: torch.Tensor, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the context extension with these factors: one of those that were published."""
    factor = round(float(factors.max()), 4)
    for original in (8192, 4096, 16384, 32768):
        rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = original
        expected = llama3_factors(config["rope_parameters"] | rope, config["head_dim"])
        if torch.allclose(expected, factors.float(), rtol=1e-4):
            return rope
    raise CheckpointError(f"{where} has a {_ROPE_FACTORS} that is no known context extension")


def import_gguf(
    src: PathLike,
    dst: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    layout: ExpertLayout = "grouped",
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Convert a GGUF file to a te_models folder: values, in float32 where blocks are dequantized, and the tokenizer.

    Arguments:
        dtype: convert the weights to it; None keeps float32, float16 and bfloat16 tensors as they are.
        layout: expert layout of the result.

    Raises MissingExtraError without the package `gguf`, and CheckpointError, before anything is written, for a file
    that cannot be read, an architecture that is not in ARCHITECTURES, and tensors that it does not have. The tokenizer
    needs transformers; without that a note says that it was left out.
    """
    check_layout(layout)
    path = Path(src)
    if not path.is_file():
        raise CheckpointError(f"{path} is no file")
    store = GGUFStore(path)
    with tempfile.TemporaryDirectory(prefix="gguf-") as scratch:
        folder = Path(scratch)
        note = None if options.get("dry_run") else save_tokenizer(path, folder, store.fields)
        (folder / "config.json").write_text(json.dumps(store.config, indent=2) + "\n", encoding="utf-8")
        with Conversion(folder, dst, {**options, "verify": False}, files=store) as conversion:
            ckpt = conversion.ckpt
            plan = plan_te_folder(ckpt, layout, dtype=as_torch_dtype(dtype))
            report = moved_report(plan, ckpt.tensors, values=store.kinds)
            notes = plan.notes if note is None else (*plan.notes, note)
            plan = replace(plan, report=report, notes=notes)
            return conversion.write_te_folder(plan, layout, provenance_source(ckpt))


def save_tokenizer(path: Path, folder: Path, fields: Mapping[str, Any]) -> str | None:
    """Write the files of a GGUF file's tokenizer, as transformers converts it; return why it is left out, if it is, or
    what may be wrong about it. fields: the file's key-value pairs."""
    try:
        transformers = require("transformers", "hf", feature="the tokenizer")
    except ImportError as error:
        return f"the tokenizer was left out: {error}"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        return f"the tokenizer was left out, since transformers does not convert it: {str(error)[:160]}"
    note = None
    if fields.get("tokenizer.ggml.model") == "gpt2":
        note = split_as_named(tokenizer, str(fields.get("tokenizer.ggml.pre", "default")))
    elif fields.get("tokenizer.ggml.model") == "llama":
        add_space(tokenizer, bool(fields.get("tokenizer.ggml.add_space_prefix", True)))
    tokenizer.save_pretrained(folder)
    return note
