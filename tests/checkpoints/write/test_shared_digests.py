"""Each byte of a conversion is hashed once where whole parts move, and none goes unchecked, whatever else moves."""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, export_hf, import_hf, relayout, reshard
from te_models.checkpoints.folder.reading_checks import TensorDigests
from te_models.checkpoints.io.boxes import Range, full
from te_models.checkpoints.io.hashing import Lane, record_of
from te_models.checkpoints.io.header import TensorInfo
from te_models.checkpoints.io.manifest import read_manifest
from te_models.checkpoints.io.store import FileStore
from te_models.checkpoints.io.tensor_hash import part_bytes
from te_models.checkpoints.mapping.plan import OutputTensor, copy_of
from te_models.checkpoints.mapping.stream import CopiedBytes
from te_models.checkpoints.mapping.tensor_map import Piece
from te_models.checkpoints.write import shared_digests
from te_models.checkpoints.write.shared_digests import SharedDigests
from te_models.kernels.backend import using_backend
from tests.checkpoints.aligned_folders import DENSE, MIXTURE, make_earlier, make_folder, stored_bytes
from tests.checkpoints.write.test_resumed_conversion import interrupted
from tests.compare import refused

CUT = {**DENSE, "head_dim": 48, "intermediate_size": 120}
"""Heads and MLPs that do not begin at multiples of 64 rows."""

TRANSPOSED = {"model_type": "gpt2", "vocab_size": 130, "n_embd": 128, "n_layer": 1, "n_head": 2, "n_positions": 64}
"""Its linear layers lie the other way in the family's files."""

Convert = Callable[[Path, Path], Any]
FEW = 40_000
"""Bytes of a file, so that there are several."""


def to_float(a: Path, b: Path) -> None:
    export_hf(a, b, dtype="float32")


def export_files(a: Path, b: Path) -> None:
    export_hf(a, b, max_shard_bytes=FEW)


CONVERSIONS: dict[str, Convert] = {
    "export": export_hf,
    "export to several files": export_files,
    "relayout": lambda a, b: relayout(a, b, "per-gemm"),
    "reshard": lambda a, b: reshard(a, b, max_shard_bytes=FEW),
    "reshard with digests of whole files": lambda a, b: reshard(a, b, file_digests=True),
}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of bytes of tensors that are hashed from here on: data comes as memoryviews, digests as bytes."""
    counts: list[int] = []

    class Counting:
        def __init__(self, data: bytes | memoryview = b"") -> None:
            self._real = hashlib.sha256()
            self.update(data)

        def update(self, data: bytes | memoryview) -> None:
            if isinstance(data, memoryview):
                counts.append(len(data))
            self._real.update(data)

        def digest(self) -> bytes:
            return self._real.digest()

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    for module in ("tensor_hash", "sha256"):
        monkeypatch.setattr(f"te_models.checkpoints.io.{module}.hashlib", SimpleNamespace(sha256=Counting))
    with using_backend("definition"):
        yield counts


def size_of(folder: Path, part: str = "") -> int:
    """Return how many bytes the tensors of a folder have whose names contain `part`."""
    return sum(info.nbytes for _, _, name, info in stored_bytes(folder) if part in name)


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_each_byte_is_hashed_once(tmp_path: Path, hashed: list[int], config: dict[str, Any], name: str) -> None:
    import_hf(make_folder(tmp_path / "hf", config), tmp_path / "ours")
    total = size_of(tmp_path / "ours")
    assert sum(hashed) == total
    hashed.clear()
    CONVERSIONS[name](tmp_path / "ours", tmp_path / "out")
    assert sum(hashed) == total == size_of(tmp_path / "out")
    if name.startswith("export"):  # and what was split is joined again
        hashed.clear()
        import_hf(tmp_path / "out", tmp_path / "again")
        assert sum(hashed) == total
        listed = [read_manifest(tmp_path / folder)["model.safetensors"].tensors for folder in ("ours", "again")]
        assert listed[0] == listed[1]


def test_what_is_not_shared_is_hashed_twice(tmp_path: Path, hashed: list[int]) -> None:
    """Cut parts, converted numbers, and sources of earlier releases but for tensors that are one part."""
    ours = tmp_path / "ours"
    import_hf(make_folder(tmp_path / "hf", CUT), ours)
    hashed.clear()
    export_hf(ours, tmp_path / "cut")
    assert sum(hashed) == size_of(ours) + size_of(ours, "linear_qkv.weight") + size_of(ours, "linear_fc1.weight")
    hashed.clear()
    to_float(ours, tmp_path / "float")
    assert sum(hashed) == size_of(ours) + size_of(tmp_path / "float")
    make_earlier(ours, 2)
    hashed.clear()
    reshard(ours, tmp_path / "new")
    small = sum(i.nbytes for _, _, _, i in stored_bytes(ours) if part_bytes(i.dtype, i.shape, 64) == i.nbytes)
    assert small > 0 and sum(hashed) == 2 * size_of(ours) - small


def places(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, byte, tensor): the first and the last byte of every part of every tensor."""
    for file, start, name, info in stored_bytes(folder):
        size = part_bytes(info.dtype, info.shape, 64)
        for begin in range(0, info.nbytes, size):
            yield file, start + info.start + begin, name
            yield file, start + info.start + min(begin + size, info.nbytes) - 1, name


def flip(file: Path, byte: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(byte)
        value = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([value ^ 1]))


FLIPPED: dict[str, tuple[dict[str, Any], int, Convert]] = {
    "experts": (MIXTURE, 3, export_hf),
    "several files": (MIXTURE, 3, export_files),
    "dense": (DENSE, 3, CONVERSIONS["relayout"]),
    "cut parts": (CUT, 3, export_hf),
    "converted": (DENSE, 3, to_float),
    "converted to as many bytes": (DENSE, 3, lambda a, b: export_hf(a, b, dtype="float16")),
    "transposed": (TRANSPOSED, 3, export_hf),
    "copied": (DENSE, 3, CONVERSIONS["reshard"]),
    "copied, whole digests": (CUT, 3, CONVERSIONS["reshard with digests of whole files"]),
    "version 2": (DENSE, 2, export_hf),
    "version 1": (DENSE, 1, CONVERSIONS["reshard"]),
}


@pytest.mark.sentinels("experts-7", "converted-7", "transposed-7", "version 2-7")
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FLIPPED)
def test_damage_anywhere_is_refused(tmp_path: Path, name: str, every: int) -> None:
    """every: which of the places are damaged, one after the other; 7: each seventh, first bytes and last ones."""
    config, version, convert = FLIPPED[name]
    ours, out = tmp_path / "ours", tmp_path / "out"
    import_hf(make_folder(tmp_path / "hf", config), ours, max_shard_bytes=FEW if name == "several files" else 10**9)
    if version < 3:
        make_earlier(ours, version)
    found = list(places(ours))
    assert len(found) > 30
    for file, byte, tensor in found[::every]:
        flip(file, byte)
        with pytest.raises(CheckpointError, match=f"{file.name}: tensor '{tensor}' does not have the SHA-256"):
            convert(ours, out)
        assert not out.exists()
        flip(file, byte)
    convert(ours, out)


@pytest.mark.sentinels("import-4")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["export", "import"])
def test_damage_before_an_interruption_is_refused_after_it(tmp_path: Path, name: str, every: int) -> None:
    """The files that the killed run finished have the damage, and come from tensors that are not read again. every:
    which of the tensors are damaged, one after the other; 4: each fourth."""
    ours, out = tmp_path / "ours", tmp_path / "out"
    import_hf(make_folder(tmp_path / "hf", DENSE), ours)
    convert: Convert = export_files
    if name == "import":
        export_hf(ours, tmp_path / "source")
        ours, convert = tmp_path / "source", lambda a, b: import_hf(a, b, max_shard_bytes=FEW)
    first = {tensor: (file, byte) for file, byte, tensor in reversed([*places(ours)])}
    for tensor, (file, byte) in [*first.items()][::every]:
        flip(file, byte)
        interrupted(convert, ours, out, files=2)
        with pytest.raises(CheckpointError, match=f"tensor '{tensor}' does not have the SHA-256"):
            convert(ours, out)
        assert not list(tmp_path.glob("*out*"))
        flip(file, byte)
    interrupted(convert, ours, out, files=2)
    convert(ours, out)


@pytest.mark.slow
@pytest.mark.parametrize("computed", [False, True])
def test_damage_before_an_interruption_is_refused_where_numbers_change(tmp_path: Path, computed: bool) -> None:
    """Such tensors have a check of their own, which a killed run does not end."""
    from te_models.checkpoints import quantize

    def convert(a: Path, b: Path) -> None:
        if computed:
            quantize(a, b, "mxfp8", max_shard_bytes=FEW)
        else:
            export_hf(a, b, dtype="float32", max_shard_bytes=FEW)

    ours, out = tmp_path / "ours", tmp_path / "out"
    import_hf(make_folder(tmp_path / "hf", DENSE), ours)
    for part in ("word_embeddings", "linear_qkv.weight"):
        file, byte, tensor = next(found for found in places(ours) if part in found[2])
        flip(file, byte)
        interrupted(convert, ours, out, files=3)
        with pytest.raises(CheckpointError, match=f"tensor '{tensor}' does not have the SHA-256"):
            convert(ours, out)
        flip(file, byte)


def test_a_resumed_conversion_hashes_what_it_reads_and_what_it_writes_once(tmp_path: Path, hashed: list[int]) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out"
    import_hf(make_folder(tmp_path / "hf", MIXTURE), ours)
    interrupted(export_files, ours, out, files=2)
    hashed.clear()
    export_files(ours, out)
    assert sum(hashed) == size_of(ours)


def test_a_finished_file_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    """Its parts are no digests of the source's."""
    ours, out = tmp_path / "ours", tmp_path / "out"
    import_hf(make_folder(tmp_path / "hf", DENSE), ours)
    working = interrupted(export_files, ours, out, files=3)
    file = min((working / "content").glob("*.safetensors"), key=lambda path: path.name)
    flip(file, file.stat().st_size - 1)
    export_files(ours, out)
    export_files(ours, tmp_path / "undisturbed")
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "undisturbed" / path.name).read_bytes()


SIZE = 64 * 64
"""Bytes of a part of rows of 64 bytes."""


def ranges(rows: int) -> list[tuple[int, int]]:
    """Return the byte ranges of the parts of a tensor of rows of 64 bytes, by its documentation."""
    return list(pairwise([*range(0, 64 * rows, SIZE), 64 * rows]))


def test_parts_are_shared_exactly_where_both_tensors_have_them() -> None:
    chosen = random.Random(1)
    shared = 0
    for _ in range(5000):
        rows = chosen.choice([64, 40, 128, 130, 256]), chosen.choice([64, 40, 128, 130, 192])
        begins = [64 * chosen.choice([0, 0, 32, 64, 66, 128, n - 64, n - 1]) for n in rows]
        most = min(64 * n - begin for n, begin in zip(rows, begins))
        nbytes = chosen.choice([most, most, most - 1, most // 2, 64])
        if min(*begins, nbytes) < 0:
            continue
        info = TensorInfo("U8", (rows[0], 64), 0, 64 * rows[0])
        files: Any = SimpleNamespace(tensors={"s": info}, part_bytes=lambda _: SIZE)
        output = OutputTensor("o", "U8", (rows[1], 64))
        found = shared_digests._shared_parts(files, output, CopiedBytes("s", begins[0], begins[1], nbytes))
        same = {
            (i, j)
            for i, (a, b) in enumerate(ranges(rows[0]))
            for j, (c, d) in enumerate(ranges(rows[1]))
            if begins[0] <= a and b <= begins[0] + nbytes
            if (a - begins[0] + begins[1], b - begins[0] + begins[1]) == (c, d)
        }
        parts = set() if found is None else {(found.source_begin + i, found.begin + i) for i in range(found.count)}
        assert parts == same, (rows, begins, nbytes)
        shared += len(parts)
    assert shared > 400


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileStore]:
    """A store of one tensor "a" of three parts, checked against a manifest."""
    save_file({"a": torch.randn(130, 32)}, tmp_path / "a.safetensors")
    with Lane() as lane:
        record = record_of(tmp_path / "a.safetensors", lane)
    with FileStore({"a.safetensors": tmp_path / "a.safetensors"}) as store:
        store.guard(TensorDigests(store, {"a.safetensors": record}))
        yield store


def parts_of(store: FileStore) -> bytes:
    """Return the digests of the parts of tensor "a"."""
    data = memoryview(bytearray(store.tensors["a"].nbytes))
    store.read_unchecked("a", 0, data)
    return b"".join(hashlib.sha256(data[at : at + 2 * SIZE]).digest() for at in range(0, len(data), 2 * SIZE))


def test_two_outputs_of_one_tensor_have_to_agree(source: FileStore) -> None:
    """A tensor that is written twice is read twice: both times what the manifest lists."""
    outputs = [copy_of(source.tensors["a"], "a", name) for name in ("first", "second")]
    good = parts_of(source)
    bad = good[:32] + good[:32] + good[64:]
    for parts in ((good, good), (good, bad), (bad, good), (bad, bad)):
        source.guard(TensorDigests(source, {"a.safetensors": record_of_store(source)}))
        shared = SharedDigests(source, source, outputs)
        for output, digests in zip(outputs, parts):
            shared.add(output.name, digests)
        shared.check_complete()
        if parts == (good, good):
            source.finish_checks()
        else:
            refused(source.finish_checks, "tensor 'a' does not have", error=CheckpointError)


def record_of_store(store: FileStore) -> Any:
    with Lane() as lane:
        return record_of(store.paths["a.safetensors"], lane)


def rows_of(store: FileStore, name: str, begin: int, end: int) -> OutputTensor:
    """An output of some rows of tensor "a"."""
    columns = store.tensors["a"].shape[1]
    box, place = (Range(begin, end), Range(0, columns)), full((end - begin, columns))
    return OutputTensor(name, store.tensors["a"].dtype, (end - begin, columns), (Piece("a", box, place, (0, 1)),))


def test_a_tensor_is_left_to_the_writer_only_if_every_part_is_written(source: FileStore) -> None:
    cuts: dict[tuple[tuple[int, int], ...], bool] = {
        ((0, 64), (64, 128), (128, 130)): True,
        ((64, 130), (0, 64)): True,
        ((0, 128), (64, 130)): True,
        ((0, 64), (128, 130)): False,
        ((64, 130),): False,
        ((0, 128),): False,
        ((0, 64), (64, 128), (128, 129), (129, 130)): False,
        ((0, 60), (60, 130)): False,
    }
    for cut, whole in cuts.items():
        outputs = [rows_of(source, str(number), *rows) for number, rows in enumerate(cut)]
        assert set(SharedDigests(source, source, outputs)._gathered) == ({"a"} if whole else set()), cut
    computed = replace(copy_of(source.tensors["a"], "a", "a"), compute=lambda: [torch.zeros(130, 32)])
    assert not SharedDigests(source, source, [computed])._gathered


def test_parts_that_never_reach_the_check_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_hf(make_folder(tmp_path / "hf", DENSE), tmp_path / "ours")
    monkeypatch.setattr(SharedDigests, "add", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"nothing has compared decoder\.final_layernorm\.weight with its manifest"):
        reshard(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_never_came_is_an_error(source: FileStore) -> None:
    shared = SharedDigests(source, source, [copy_of(source.tensors["a"], "a", "a")])
    refused(shared.check_complete, "nothing has compared a with its manifest", error=RuntimeError)
    shared.add("a", parts_of(source))
    shared.check_complete()
    source.finish_checks()
