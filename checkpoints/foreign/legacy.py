"""Files of Megatron's ranks, mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt: of tensor parallel ranks, stages and shares of
experts. `ranks` says what they hold."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from te_models.config import ModelConfig
from te_models.lazy import torch

from ..io.boxes import Box, Shape
from ..io.dtypes import dtype_name, torch_dtype
from ..io.errors import CheckpointError, quote
from ..io.header import TensorInfo, byte_count
from ..io.store import Closing, ComputedStore
from ..io.weight_files import plain_file
from .ranks import TABLES, ParallelSizes, RankFiles, RankPlace
from .torch_file import TensorRef, TorchFile, open_torch_file
from .written import Written

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
KNOWN = frozenset(
    {
        *("argparse.Namespace", "types.SimpleNamespace", "_codecs.encode", "signal.Signals", "pathlib.PosixPath"),
        *("numpy.", "megatron.", "transformer_engine.", "torch.", "builtins.set", "builtins.bytearray"),
        *("collections.defaultdict", "builtins.dict", "builtins.list", "_io.BytesIO"),
    }
)
"""What files of Megatron name beside tensors: arguments of the run, random states. Nothing of it is made."""


def is_legacy(folder: Path) -> bool:
    """Whether a folder has files of Megatron's ranks."""
    return any(_FOLDER.fullmatch(path.name) and (path / FILE).is_file() for path in folder.glob("mp_rank_*"))


def newest_of(folder: Path) -> Path:
    """Return the folder of the checkpoint that Megatron's file beside all of a run names; `folder` where there is no
    such file. Raises CheckpointError for one that names none."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    said = plain_file(folder, TRACKER).read_bytes()[:64].decode("utf-8", "replace").strip()
    if said != "release" and not re.fullmatch(r"\d{1,12}", said):
        raise CheckpointError(f"{tracker} says {quote(said)}; allowed: a number of iterations, or 'release'")
    found = folder / (said if said == "release" else f"iter_{int(said):07d}")
    if not found.is_dir():
        raise CheckpointError(f"{tracker} says {quote(said)}, and there is no {found.name}")
    return found


class LegacyStore(ComputedStore, Closing):
    """The tensors of all ranks' files, by place and name. split: how many ranks there are of each kind. pickled: how
    many modules of Transformer Engine pickled a state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[RankPlace, TorchFile] = {}
        self._refs: dict[str, tuple[RankPlace, TensorRef]] = {}
        self._fds: list[int] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.pickled = 0
        try:
            self.split = self._open_all(self._places())
        except BaseException:
            self.close()
            raise

    def _places(self) -> dict[RankPlace, Path]:
        places = {}
        for path in sorted(self.folder.glob("mp_rank_*")):
            match = _FOLDER.fullmatch(path.name)
            if match is None:
                raise CheckpointError(
                    f"{self.folder} has {quote(path.name)}; allowed: mp_rank_XX, mp_rank_XX_YYY and mp_rank_XX_YYY_ZZZ"
                )
            places[RankPlace(*(int(number or 0) for number in match.groups()))] = path
        return places

    def _open_all(self, places: dict[RankPlace, Path]) -> ParallelSizes:
        chunks = max(self._open(place, path) for place, path in places.items())
        if any(place.pp for place in places) and not any(place.ep for place in places):
            # Megatron leaves a number out where there is one stage: the last is then the share of experts
            second = [place for place in places if place.pp and f"{place}{TABLES[0]}" in self.tensors]
            if second:
                self._files = {RankPlace(p.tp, 0, p.pp): file for p, file in self._files.items()}
                self._refs = {self._moved(n): (RankPlace(p.tp, 0, p.pp), r) for n, (p, r) in self._refs.items()}
                self.tensors = {self._moved(name): info for name, info in self.tensors.items()}
        tp, pp, ep = (1 + max(place[axis] for place in self._files) for axis in (0, 1, 2))
        split = ParallelSizes(tp, pp, ep, chunks)
        for tp in range(split.tp):
            for pp in range(split.pp):
                for ep in range(split.ep):
                    if RankPlace(tp, pp, ep) not in self._files:
                        raise CheckpointError(
                            f"{self.folder} has no file of tensor parallel rank {tp} of {split.tp} in stage {pp} of "
                            f"{split.pp}, share {ep} of {split.ep} of the experts"
                        )
        return split

    @staticmethod
    def _moved(name: str) -> str:
        place, rest = RankPlace.of(name)
        return f"{RankPlace(place.tp, 0, place.pp, place.chunk)}{rest}"

    def _open(self, place: RankPlace, path: Path) -> int:
        """Return how many chunks of layers the file holds."""
        where = f"{path.name}/{FILE}"
        fd, opened = open_torch_file(path / FILE, where, KNOWN)
        self._fds.append(fd)
        held = opened.value if isinstance(opened.value, dict) else {}
        models = [held["model"]] if "model" in held else []
        while not models or f"model{len(models)}" in held:
            models.append(held.get(f"model{len(models)}"))
            if not isinstance(models[-1], dict):
                break
        self._files[place] = opened
        for chunk, model in enumerate(models):
            if not isinstance(model, dict):
                raise CheckpointError(f"{where} has no 'model' with names of tensors")
            for name, value in model.items():
                if isinstance(name, str) and "_extra_state" in name:
                    self.pickled += value.shape != (0,) if isinstance(value, TensorRef) else value is not None
                elif isinstance(name, str) and isinstance(value, TensorRef):
                    kind, stored = dtype_name(getattr(torch, value.dtype)), f"{place._replace(chunk=chunk)}{name}"
                    self._refs[stored] = place, value
                    self.tensors[stored] = TensorInfo(kind, value.shape, 0, byte_count(kind, value.shape))
        return len(models)

    def ranks(self, config: ModelConfig) -> RankFiles:
        """Return what the files hold of a model. Tables lose the rows that only fill up."""
        tables = [self.tensors.get(f"{RankPlace(tp, 0)}{TABLES[0]}") for tp in range(self.split.tp)]
        rows = sum(info.shape[0] if info is not None and info.shape else 0 for info in tables)
        ranks = RankFiles(config, self.split, max(rows, config.vocab_size) if rows else config.vocab_size, self.tensors)
        for name, info in [*self.tensors.items()]:
            place, rest = RankPlace.of(name)
            held = ranks.held_rows(place.tp)
            if rest in TABLES and info.shape[:1] == (ranks.rows,) and held < ranks.rows:
                shape = (held, *info.shape[1:])
                self.tensors[name] = TensorInfo(info.dtype, shape, 0, byte_count(info.dtype, shape))
                if not held:
                    del self.tensors[name]
        return ranks

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.pop())

    def read(self, name: str, box: Box) -> torch.Tensor:
        place, ref = self._refs[name]
        return self._files[place].read(ref, box)


def write_legacy(folder: Path, outputs: Mapping[str, Written], ranks: RankFiles) -> None:
    """Write the files of all ranks to an existing folder, as `release`, which Megatron begins a run with.

    There are no `args` in them: Megatron keeps those as an object of a class that reading with weights_only refuses,
    and begins a run without them.
    """
    from .write_torch import write_torch_file

    split = ranks.split
    outputs = {**outputs, **_filling(outputs, ranks)}
    copies = ranks.copies(outputs)
    held: dict[RankPlace, list[Written]] = {}
    for name in (*outputs, *copies):
        place, rest = RankPlace.of(name)
        its = outputs[copies.get(name, name)]
        held.setdefault(place, []).append(Written(rest, its.dtype, its.shape, its.rows))
    for (tp, pp, ep, _), its in held.items():
        path = folder / "release" / _name(tp, pp, ep, split)
        path.mkdir(parents=True)
        filled = [_filled(output, ranks) for output in its]
        write_torch_file(path / FILE, {"checkpoint_version": 3.0}, filled, "model")
    (folder / TRACKER).write_text("release", encoding="utf-8")


def _filling(outputs: Mapping[str, Written], ranks: RankFiles) -> dict[str, Written]:
    """Return the tables of ranks that have none of the model's rows."""
    found = {}
    for name, output in outputs.items():
        place, rest = RankPlace.of(name)
        if rest in TABLES and place.tp == 0:
            for tp in range(1, ranks.split.tp):
                shape = (0, *output.shape[1:])
                its = Written(f"{place._replace(tp=tp)}{rest}", output.dtype, shape, output.rows)
                found |= {} if its.name in outputs else {its.name: its}
    return found


def _name(tp: int, pp: int, ep: int, split: ParallelSizes) -> str:
    """As Megatron calls it: of one stage, or of whole layers of experts, the number is left out."""
    stage = f"_{pp:03d}" if split.pp > 1 else ""
    return f"mp_rank_{tp:02d}{stage}" + (f"_{ep:03d}" if split.ep > 1 else "")


def _filled(output: Written, ranks: RankFiles) -> Written:
    """Return a table with as many rows as every rank has, of which the last ones are zeros."""
    if output.name not in TABLES or output.shape[0] == ranks.rows:
        return output
    shape: Shape = (ranks.rows, *output.shape[1:])
    return Written(output.name, output.dtype, shape, _with_zeros(output))


def _with_zeros(output: Written) -> Callable[[int, int], torch.Tensor]:
    def rows(begin: int, end: int) -> torch.Tensor:
        held = min(max(output.shape[0], begin), end)
        zeros = torch.zeros((end - held, *output.shape[1:]), dtype=torch_dtype(output.dtype), device="cpu")
        return torch.cat([output.rows(begin, held), zeros]) if held > begin else zeros

    return rows
