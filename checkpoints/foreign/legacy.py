"""Megatron's checkpoints of ranks: mp_rank_XX[_YYY]/model_optim_rng.pt, of tensor and pipeline parallel ranks.

Every file holds the names of Megatron-Core's modules, with layers counted from the stage's first. Tensors are split
along their rows or their columns over the tensor parallel ranks XX; what is whole on each is read from the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from te_models.config import ModelConfig
from te_models.lazy import later

from ..io.boxes import Box
from ..io.dtypes import dtype_name
from ..io.errors import CheckpointError, quote
from ..io.header import TensorInfo, byte_count
from ..io.store import BoxStore
from ..io.weight_files import plain_file
from ..plan.layout_ops import At, Concat, Layout, Rows, Stack
from ..plan.param_shapes import expected_tensors, head_sizes
from ..plan.tensor_map import Link, Namespace, Stored
from .megatron import named_norm
from .torch_file import TensorRef, TorchFile

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_KNOWN = frozenset(
    {
        *("argparse.Namespace", "types.SimpleNamespace", "_codecs.encode", "signal.Signals", "pathlib.PosixPath"),
        *("numpy.", "megatron.", "transformer_engine.", "torch.", "builtins.set", "builtins.bytearray"),
        *("collections.defaultdict", "builtins.dict", "builtins.list"),
    }
)
"""What files of Megatron name beside tensors: arguments of the run, random states. Nothing of it is made."""
_COLUMNS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight")
_ROWS = (
    *("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    *("mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.shared_experts.linear_fc1.weight"),
)


def is_legacy(folder: Path) -> bool:
    """Whether a folder has files of Megatron's ranks."""
    return any(_FOLDER.fullmatch(path.name) and (path / FILE).is_file() for path in folder.glob("mp_rank_*"))


class LegacyStore(BoxStore):
    """The tensors of all ranks' files, as "TP.PP:NAME". tp, pp: how many ranks there are of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TorchFile] = {}
        self._refs: dict[str, tuple[str, TensorRef]] = {}
        self._fds: list[int] = []
        self.tensors: dict[str, TensorInfo] = {}
        places = {}
        for path in sorted(folder.glob("mp_rank_*")):
            match = _FOLDER.fullmatch(path.name)
            if match is None:
                raise CheckpointError(
                    f"{folder} has {quote(path.name)}; allowed: files of tensor and pipeline parallel ranks, "
                    "mp_rank_XX and mp_rank_XX_YYY (experts that ranks share are in distributed checkpoints)"
                )
            places[int(match[1]), int(match[2] or 0)] = path
        self.tp, self.pp = (1 + max(place[axis] for place in places) for axis in (0, 1))
        try:
            for tp in range(self.tp):
                for pp in range(self.pp):
                    if (tp, pp) not in places:
                        raise CheckpointError(
                            f"{folder} has no file of rank {tp} of {self.tp} in stage {pp} of {self.pp}"
                        )
                    self._open(f"{tp}.{pp}", places[tp, pp])
        except BaseException:
            self.close()
            raise

    def _open(self, place: str, path: Path) -> None:
        file = plain_file(path, FILE)
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._fds.append(fd)
        where = f"{path.name}/{FILE}"
        opened = TorchFile(fd, 0, file.stat().st_size, where, _KNOWN)
        model = opened.value.get("model") if isinstance(opened.value, dict) else None
        if not isinstance(model, dict):
            raise CheckpointError(f"{where} has no 'model' with names of tensors")
        self._files[place] = opened
        for name, value in model.items():
            if isinstance(name, str) and isinstance(value, TensorRef) and "_extra_state" not in name:
                kind = dtype_name(getattr(torch, value.dtype))
                self._refs[f"{place}:{name}"] = place, value
                self.tensors[f"{place}:{name}"] = TensorInfo(kind, value.shape, 0, byte_count(kind, value.shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.pop())

    def read(self, name: str, box: Box) -> torch.Tensor:
        place, ref = self._refs[name]
        return self._files[place].read(ref, box)


def legacy_namespace(config: ModelConfig, store: LegacyStore) -> Namespace:
    """Return how the files store a model. Raises CheckpointError for one that they cannot be of."""
    if config.mixers or config.attention.mla is not None or config.mtp_num_layers:
        raise CheckpointError("files of Megatron's ranks are read of models with plain attention in all layers")
    layers, tp = config.num_layers, store.tp
    if layers % store.pp or config.attention.num_query_groups is None or config.attention.num_query_groups % tp:
        raise CheckpointError(f"{layers} layers in {store.pp} stages, or the key heads over {tp} ranks, do not divide")
    canonical = expected_tensors(config)
    stored: dict[str, Stored] = {}
    links: list[Link] = []
    for name, shape in canonical.items():
        for p in _placed(config, store, name, shape).place(shape):
            stored[p.stored] = Stored(p.stored_shape, convertible=not name.endswith(".expert_bias"))
            links.append(Link(name, p.box, p.stored, p.stored_box, p.axes))
    return Namespace(canonical, stored, tuple(links))


def _placed(config: ModelConfig, store: LegacyStore, name: str, shape: tuple[int, ...]) -> Layout:
    each = config.num_layers // store.pp
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        stage = 0 if name.startswith("embedding.") else store.pp - 1
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            names = [f"{t}.{stage}:{name}" for t in range(store.tp)]
            rows = [store.tensors[n].shape[0] if n in store.tensors else 0 for n in names]
            if sum(rows) != shape[0]:
                raise CheckpointError(f"{name} has {sum(rows)} rows over all ranks; allowed: {shape[0]}")
            return Concat(*((At(n), size) for n, size in zip(names, rows, strict=True)))
        return At(f"0.{stage}:{name}")
    stage, local = divmod(int(match[1]), each)
    rest, at = match[2], f"decoder.layers.{local}."
    places = [f"{t}.{stage}:" for t in range(store.tp)]
    if rest.startswith("mlp.experts."):
        assert config.moe is not None, "the layer has experts"
        return Stack(*(_split(config, _expert(store, places, at, rest, e), rest, shape[1:]) for e in range(shape[0])))
    return _split(config, [named_norm(place + at, rest, store.tensors) for place in places], rest, shape)


def _expert(store: LegacyStore, places: list[str], at: str, rest: str, expert: int) -> list[str]:
    """Return the names of an expert's weight on each rank: one module each, or one of all."""
    part, _, kind = rest.removeprefix("mlp.experts.").rpartition(".")
    alone = [f"{place}{at}mlp.experts.local_experts.{expert}.{part}.{kind}" for place in places]
    joined = [f"{place}{at}mlp.experts.{part}.{kind}{expert}" for place in places]
    return joined if joined[0] in store.tensors else alone


def _split(config: ModelConfig, names: list[str], rest: str, shape: tuple[int, ...]) -> Layout:
    """Return a tensor of a layer that ranks have parts of, by these names."""
    tp = len(names)
    plain = rest.replace("mlp.experts.", "mlp.")
    if plain.startswith("self_attention.linear_qkv.") and plain in _ROWS:
        heads, groups, size = head_sizes(config.attention)
        each, own = heads // groups, groups // tp
        total = own * (each + 2) * size
        at = [(names[g // own], g % own * (each + 2) * size) for g in range(groups)]
        q = [(Rows(n, begin, total), each * size) for n, begin in at]
        k, v = ([(Rows(n, begin + (each + part) * size, total), size) for n, begin in at] for part in (0, 1))
        return Concat(*q, *k, *v)
    if plain in _COLUMNS:
        return Concat(*((At(n), shape[1] // tp) for n in names), dim=1)
    if plain in _ROWS:
        parts = 2 if config.mlp.gated else 1
        rows = shape[0] // parts // tp
        return Concat(*((Rows(n, part * rows, parts * rows), rows) for part in range(parts) for n in names))
    return At(names[0])


def copies_of(store: LegacyStore, namespace: Namespace) -> Iterator[str]:
    """Yield the tensors that repeat, on other ranks, what the first one has."""
    for name in store.tensors:
        if name not in namespace.stored and f"0.{name.partition('.')[2]}" in namespace.stored:
            yield name
