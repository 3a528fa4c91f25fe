"""Edits of index.safetensors, digests remade: refused in one sentence, or of no effect; and who digests what."""

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from te_models.checkpoints.io.manifest import manifest_bytes, record_files
from te_models.checkpoints.write.writer import write_tensors
from te_models.parallel.parts import LocalPart
from te_models.training import TrainingCheckpointError
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.checkpoints.files import INDEX, digests_of
from te_models.training.checkpoints.sharded.index import file_of
from te_models.training.checkpoints.sharded.index_file import write_file
from te_models.training.checkpoints.sharded.join import describe_parts, join, written_boxes
from tests.training.checkpoints.test_sharded_index import Edit, assert_told, sealed, tensors

ROWS = {0: {0: ((0, 2),)}, 1: {0: ((2, 6),)}}
COLUMNS = {0: {1: ((0, 1), (3, 4))}, 1: {1: ((1, 3),)}}
CUTS = {"model.rows": ROWS, "model.columns": COLUMNS, "optimizer.rows.exp_avg": ROWS}


def parts_of(rank: int) -> dict[str, LocalPart]:
    """Of two ranks, which have the step both."""
    found: dict[str, LocalPart] = {}
    for name, value in tensors().items():
        if name in CUTS:
            some = LocalPart(value, tuple(value.shape), CUTS[name][rank])
            found[name] = LocalPart(some.of_whole(value), some.shape, some.cuts)
        elif not name.startswith("rng.") or name.startswith(f"rng.{rank}."):
            found[name] = LocalPart.undivided(value)
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as two ranks write it."""
    around = tmp_path_factory.mktemp("run")
    folder = around / "step-00000004"
    (folder / "parts").mkdir(parents=True)
    index, writes = join([describe_parts(parts_of(rank)) for rank in range(2)])
    for rank in range(2):
        file = folder / "parts" / file_of(rank)
        record = write_tensors(file, written_boxes(parts_of(rank), writes[rank]))
        (folder / "parts" / digests_of(file.name)).write_bytes(manifest_bytes({file.name: record}))
    write_file(folder / "parts", index)
    return sealed(folder)


Arrays = dict[str, torch.Tensor]


def of_arrays(change: Callable[[Arrays, dict[str, str]], object]) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "parts" / INDEX
        with safe_open(file, "pt") as opened:
            metadata = dict(opened.metadata())
        arrays = load_file(file)
        change(arrays, metadata)
        save_file({name: array.contiguous() for name, array in arrays.items()}, file, metadata)

    return edit


NUMBERS = (-1, 0, 1, 2, 7, 255, 1 << 31, (1 << 61) - 1, 1 << 61, (1 << 63) - 1, -(1 << 63))


def cases(original: Path) -> Iterator[tuple[str, Edit]]:
    def put(arrays: Arrays, name: str, at: int, value: int) -> None:
        arrays[name][at] = value

    def replace(arrays: Arrays, name: str, value: torch.Tensor) -> None:
        arrays[name] = value

    for name, array in load_file(original / "parts" / INDEX).items():
        limits = torch.iinfo(array.dtype)
        for at in range(len(array)) if name != "names" else range(0, len(array), 9):
            for value in NUMBERS:
                if limits.min <= value <= limits.max:
                    yield f"{name}[{at}] = {value}", of_arrays(lambda a, m, n=name, i=at, v=value: put(a, n, i, v))
        for what, other in {
            "cut": array[:-1],
            "empty": array[:0],
            "longer": torch.cat([array, array[-1:]]),
            "twice": torch.cat([array, array]),
            "wider": array.view(1, -1),
            "float": array.float(),
        }.items():
            yield f"{name} {what}", of_arrays(lambda a, m, n=name, v=other: replace(a, n, v))
        yield f"without {name}", of_arrays(lambda a, m, n=name: a.pop(n))
    yield "more", of_arrays(lambda a, m: a.update(more=torch.zeros(1)))
    for key, values in {
        "ranks": ("", "0", "1", "3", "-1", "²", "x", "9" * 40, "2 "),
        "dtypes": ("", ",", "F32", "F32,U8,", "U8,F32", "F4,U8", "float32,U8", "\n,U8"),
    }.items():
        for value in values:
            yield f"{key} {value!r}", of_arrays(lambda a, m, k=key, v=value: m.update({k: v}))
        yield f"without {key}", of_arrays(lambda a, m, k=key: m.pop(k))
    chance, size = random.Random(0), (original / "parts" / INDEX).stat().st_size
    for _ in range(150):
        place, byte = chance.randrange(size), chance.randrange(256)

        def flipped(folder: Path, place: int = place, byte: int = byte) -> None:
            data = bytearray((folder / "parts" / INDEX).read_bytes())
            data[place] = byte
            (folder / "parts" / INDEX).write_bytes(data)

        yield f"byte {place} = {byte}", flipped
    yield "very long", lambda folder: (folder / "parts" / INDEX).write_bytes(b"x" * (4 << 20))


def test_edits_of_the_index_are_told(original: Path, tmp_path: Path) -> None:
    """A part of them; the next test makes all."""
    assert not assert_told(original, tmp_path, "nothing", lambda folder: None)
    for name, edit in list(cases(original))[::29]:
        assert_told(original, tmp_path, name, edit)


@pytest.mark.slow
def test_all_edits_of_the_index_are_told(original: Path, tmp_path: Path) -> None:
    found = list(cases(original))
    assert len(found) > 600
    assert sum(assert_told(original, tmp_path, name, edit) for name, edit in found) > 400


def test_an_edit_of_a_rank_file_is_told_by_its_list(original: Path, tmp_path: Path) -> None:
    """And one of the list by manifest.json, one that is remade as well."""
    folder = tmp_path / original.name
    shutil.copytree(original, folder)
    file = folder / "parts" / file_of(1)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(TrainingCheckpointError, match=r"does not have the SHA-256 that rank-00001\.json says; tensor"):
        load_state(folder)
    load_state(folder, share=(0, 2))
    (folder / "parts" / digests_of(file.name)).write_bytes(manifest_bytes(record_files({file.name: file})))
    with pytest.raises(TrainingCheckpointError, match=r"rank-00001\.json does not have the SHA-256 that manifest"):
        load_state(folder, share=(1, 2))


def test_a_reader_opens_the_files_of_its_share_alone(original: Path) -> None:
    opened: list[str] = []
    on = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if on and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    load_state(original, share=(1, 2))
    on = False
    files = {Path(name).name for name in opened if "/parts/" in name}
    assert {INDEX, file_of(1), digests_of(file_of(1))} <= files
    assert not {file_of(0), digests_of(file_of(0))} & files
