"""What a first configuration is made for: the model (only its configuration is read), the machine, and the text (read
as far as it decides sizes)."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from te_models.checkpoints import CheckpointError, open_checkpoint
from te_models.checkpoints.families import family_of
from te_models.checkpoints.folder.te_folder import CONFIG, MODEL_TYPE
from te_models.checkpoints.formats import declares_quantization, without_quantization
from te_models.checkpoints.io.hub import local_folder
from te_models.checkpoints.io.model_folder import check_model_folder
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.io.weight_files import plain_file

from ..catalogue import entry, names, near_names
from ..config import ModelConfig
from ..sizes import plural
from ..training.build import resolve_device
from ..training.config import DataConfig
from ..training.data.dataset import TokenDataset, check_ids
from ..training.data.documents import documents_of, matching_files, spans_of
from ..training.data.encoder import load_encoder
from ..training.data.errors import DataError
from ..training.data.formats import Fields, RowError
from ..training.data.pairs import FORMAT, has_pairs
from ..training.data.streamed import is_stream
from ..training.data.windows import pack_documents
from ..training.preflight import host_memory

_SHARE = {"cpu": 0.75, "cuda": 0.9}
"""Of a device's memory that a run may plan with: the rest is the system's, other programs' and torch's own."""
_ROWS = ("messages", "sharegpt", "alpaca", "preference", "prompt_completion")
"""Formats of chats and answers, the first that a row fits."""
HELD_OUT = 0.01
"""Of the windows, as a run holds them out where nothing is said."""
MOST_HELD_OUT = 0.2


@dataclass(frozen=True)
class Base:
    """A model. name: of its folder. asked: what the user named. path: its folder here, None: it is on the hub.
    quantized: whether its weights are stored quantized. published: its name in the catalogue, if that was given."""

    name: str
    asked: str
    path: str | None
    config: ModelConfig
    quantized: bool
    published: str | None = None

    @classmethod
    def read(cls, name: str) -> Base:
        """Read config.json of a folder or a hub id, or an entry of the catalogue. Raises CheckpointError for a model
        that there is not, or not known to any family."""
        if not Path(name).exists() and name.lower() in names():
            found = entry(name)
            return cls(found.name, found.hub_id, None, found.read_config(), found.format is not None, found.name)
        folder = local_folder(name, allow_patterns=[CONFIG, "hf_quant_config.json"])
        if not folder.exists():
            where = "a folder, nor a hub id (ORGANISATION/NAME), nor in the catalogue"
            raise CheckpointError(f"{name} is not {where}{near_names(name)}")
        check_model_folder(folder)
        path = name if Path(name).exists() else None
        values = read_object(plain_file(folder, CONFIG), f"{folder}/{CONFIG}")
        if values.get("model_type") == MODEL_TYPE:
            with open_checkpoint(folder, verify=False) as opened:  # headers say which weights are stored quantized
                config, quantized = opened.config, bool(opened.formats)
        else:
            config = family_of(values.get("model_type")).read_config(without_quantization(values))
            quantized = declares_quantization(values, folder)
        short = Path(name.partition("@")[0]).resolve().name if path is None else folder.resolve().name
        return cls(short, name, path, config, quantized)


@dataclass(frozen=True)
class Machine:
    """What a run has here. memory: bytes that a plan may use; capability: of a GPU; compiles: whether torch.compile
    has what it needs."""

    device: str
    name: str
    memory: int
    capability: tuple[int, int] | None
    compiles: bool

    @classmethod
    def here(cls) -> Machine:
        """Return this machine: its first GPU, or else its processor."""
        device = resolve_device("auto")
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            total, name = properties.total_memory, properties.name
            capability, compiles = (properties.major, properties.minor), True
        else:
            total, name, capability = host_memory(swap=False), "CPU", None
            compiles = any(map(shutil.which, ("g++", "clang++", "c++")))
        return cls(device, name, int(_SHARE[device] * total), capability, compiles)

    def recipe(self) -> tuple[str, str]:
        """Return the recipe that this device runs fastest, and why."""
        if self.capability is None:
            return "none", "a CPU multiplies bf16 fastest; recipes are emulated exactly"
        major, minor = self.capability
        if major >= 10:
            return "mxfp8", f"compute capability {major}.{minor} multiplies MXFP8"
        if (major, minor) >= (8, 9):
            return "current", f"compute capability {major}.{minor} multiplies FP8 with a scale per tensor"
        return "none", f"compute capability {major}.{minor} has no FP8 GEMMs"


@dataclass(frozen=True)
class Amount:
    """How much text there is. ends: where each document ends, in tokens; whole: whether there is no more of it; packed:
    whether windows are rows of whole documents; pairs: whether they are pairs of documents."""

    ends: tuple[int, ...]
    whole: bool
    packed: bool
    pairs: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens were counted."""
        return self.ends[-1] if self.ends else 0

    def windows(self, length: int) -> int:
        """Return how many windows of a length there are, at least."""
        if self.pairs:
            counts = torch.diff(torch.tensor((0, *self.ends), device="cpu"))
            return int((counts[: len(counts) // 2 * 2].view(-1, 2).amax(-1) <= length).sum())
        return (
            len(pack_documents(torch.tensor(self.ends, device="cpu"), length)) if self.packed else self.tokens // length
        )

    def length(self, wanted: int) -> int:
        """Return the longest window, halved from the wanted one, of which the text has one."""
        while self.whole and wanted > 2 and not self.windows(wanted):
            wanted //= 2
        return wanted

    def micro_batch(self, length: int, most: int) -> int:
        """Return the largest micro-batch, halved from the most, that a fifth of the windows fills."""
        while self.whole and most > 1 and self.windows(length) * MOST_HELD_OUT < most:
            most //= 2
        return most

    def held_out(self, length: int, size: int) -> float | None:
        """Return which part of the windows validation takes: a batch of `size`, or none where that is more than a fifth
        of them; None: the part that a run holds out by itself is enough."""
        windows = self.windows(length)
        if not self.whole or int(windows * HELD_OUT) >= size or (size == 1 < windows and windows * MOST_HELD_OUT >= 1):
            return None
        if windows * MOST_HELD_OUT < size:
            return 0.0
        part = math.ceil(100 * size / windows) / 100
        return part if int(windows * part) >= size else part + 0.01


def data_format(data: Sequence[str]) -> str:
    """Return the format of the first row of the first JSON lines among files, "text" where there are none."""
    for file in (file for file in matching_files(data) if file.suffix in (".jsonl", ".ndjson")):
        try:
            with file.open(encoding="utf-8-sig") as lines:
                row = json.loads(next((line for line in lines if line.strip()), ""))
        except (OSError, ValueError, RecursionError):
            return "text"
        names = list(row) if isinstance(row, dict) else []
        for name in _ROWS:
            try:
                Fields(name).check_columns(str(file), names)  # type: ignore[arg-type]
            except RowError:
                continue
            return name
        return "text"
    return "text"


def amount_of(data: DataConfig, enough: int, vocab_size: int) -> Amount | None:
    """Read text until it has enough tokens, and return how much there is; None: of a stream, because that is not read.

    Raises DataError, TokenizerError and CheckpointError as a run does that builds a data set of it.
    """
    if data.path is not None and Path(data.path).is_dir():
        dataset = TokenDataset.open(data.path)
        pairs = has_pairs(dataset)
        ends = tuple(dataset.document_ends.tolist()) if data.pack_documents or pairs else (len(dataset),)
        return Amount(ends, len(dataset) < enough, data.pack_documents, pairs)
    files = matching_files(data.text)
    if any(is_stream(str(file)) for file in files):
        return None
    fields = data.documents.reading(data.text_field, data.messages_field)
    encoder = load_encoder(str(data.tokenizer), format=fields.format, options=data.documents)
    pairs = fields.format == FORMAT
    skipped: list[str] | None = [] if data.skip_bad_rows else None
    ends = [0]
    for span in itertools.chain.from_iterable(spans_of(file, fields) for file in files):
        for document in documents_of(span, fields, skipped):
            for pieces, _ in encoder.documents(document):
                count = 0
                for ids, _ in pieces:
                    check_ids(ids, document.where, vocab_size)
                    count += len(ids)
                    if ends[-1] + count >= enough:
                        return Amount((*ends[1:], ends[-1] + count), False, data.pack_documents, pairs)
                ends.append(ends[-1] + count)
    if ends[-1] < 2:
        raise DataError(f"data.text has {plural(ends[-1], 'token')}; allowed: 2 or more, as the shortest window has")
    return Amount(tuple(ends[1:]), True, data.pack_documents, pairs)
