"""Edits of a sharded checkpoint's index and files, digests remade: refused in one sentence, or of no effect."""

import contextlib
import copy
import functools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.boxes import Range, tiles
from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes, record_files
from te_models.parallel.parts import LocalPart
from te_models.training import TrainingCheckpointError
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.checkpoints.checks import SHARDED_VERSION, VALUES
from te_models.training.checkpoints.files import sharded_paths
from te_models.training.checkpoints.sharded.checkpoint import load_parts, read_private
from te_models.training.seeding import random_state
from tests.training.runs import tiny_model, tiny_run

BOXES = {
    "model.rows": [((0, 0), (2, 4)), ((2, 0), (4, 4))],
    "model.columns": [((0, 0), (6, 2)), ((0, 2), (6, 2))],
    "optimizer.rows.exp_avg": [((0, 0), (3, 3)), ((0, 3), (3, 1)), ((3, 0), (3, 3)), ((3, 3), (3, 1))],
    "optimizer.rows.step": [((), ())],
}
"""Boxes of each tensor, of the two ranks in turn. Two of the tensors are cut in columns or both ways."""
Edit = Callable[[Path], object]


def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    found = {name: torch.rand(6, 4, generator=chance) for name in BOXES if not name.endswith(".step")}
    found["optimizer.rows.step"] = torch.tensor(4.0)
    for rank in range(2):
        found |= {f"rng.{rank}.{name}": state for name, state in random_state().items()}
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, beside a file that is not its own."""
    around = tmp_path_factory.mktemp("run")
    folder = around / "step-00000004"
    (folder / "parts").mkdir(parents=True)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    index = {}
    for name, value in sorted(tensors().items()):
        boxes = []
        for number, (begin, shape) in enumerate(BOXES.get(name, [((0,) * value.dim(), tuple(value.shape))])):
            cut = value[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]
            files[number % 2][f"{name}@{','.join(map(str, begin))}"] = cut.contiguous()
            file = f"rank-{number % 2:05d}.safetensors"
            boxes.append({"begin": list(begin), "shape": list(shape), "file": file})
        dtype = {torch.float32: "F32", torch.uint8: "U8"}[value.dtype]
        index[name] = {"dtype": dtype, "shape": list(value.shape), "boxes": boxes}
    for number, parts in enumerate(files):
        save_file(parts, folder / "parts" / f"rank-{number:05d}.safetensors")
    (folder / "parts/index.json").write_text(json.dumps({"tensors": index}))
    shutil.copy(folder / "parts/rank-00000.safetensors", around / "secret.safetensors")
    return sealed(folder)


def sealed(folder: Path) -> Path:
    """Give a checkpoint of two ranks its values and its manifest."""
    config = tiny_run(folder.parent)
    values = {"version": SHARDED_VERSION, "step": 4, "position": 4 * 2 * 2 * 2, "world_size": 2, "data_ranks": 2}
    values |= {"data_digest": "0" * 64, "config": config.to_dict(), "model_config": tiny_model().to_dict()}
    (folder / VALUES).write_text(json.dumps(values))
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(manifest_bytes(record_files(sharded_paths(folder))))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read the checkpoint as a run that continues does, into memory that is not what is to be read."""
    assert load_state(folder).parts is not None
    shapes = {name: value for name, value in tensors().items() if not name.startswith("rng.")}
    parts = {name: LocalPart.undivided(torch.full_like(value, torch.nan)) for name, value in shapes.items()}
    load_parts(folder, parts)
    found = {name: part.tensor for name, part in parts.items()}
    for rank in range(2):
        found |= {f"rng.{rank}.{name}": value for name, value in read_private(folder, "rng", rank).items()}
    return found


def assert_told(original: Path, tmp_path: Path, name: str, edit: Edit) -> bool:
    """Whether the edit was refused; nothing else may come of it than the same numbers or a sentence."""
    folder = tmp_path / original.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    edit(folder)
    with contextlib.suppress(CheckpointError, OSError):  # otherwise the manifest stays as it was
        seal(folder)
    try:
        found = read(folder)
    except (TrainingCheckpointError, CheckpointError) as error:
        sentence = str(error)
        assert "\n" not in sentence and "\0" not in sentence and len(sentence) < 900, (name, sentence)
        assert "Error(" not in sentence, (name, sentence)
        return True
    except BaseException as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    right = tensors()
    assert all(torch.equal(found[key], value) for key, value in right.items() if "rng" not in key), name
    return False


def of_index(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "parts/index.json"
        values = json.loads(file.read_text())
        change(values["tensors"])
        file.write_text(json.dumps(values))

    return edit


def of_text(change: Callable[[bytes], bytes]) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "parts/index.json"
        file.write_bytes(change(file.read_bytes()))

    return edit


def of_file(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "parts/rank-00001.safetensors"
        found = load_file(file)
        change(found)
        save_file({name: value.contiguous() for name, value in found.items()}, file)

    return edit


FILES = (
    *("/etc/passwd", "../../secret.safetensors", "../training.json", "parts/rank-00000.safetensors", "", ".", ".."),
    *("rank-00000.safetensors\0", "\0", "a" * 300, "index.json", "rank-00007.safetensors", "link.safetensors"),
    *("~/x", "rank-00000.safetensors/", "\n", "\ud800", "RANK-00000.SAFETENSORS", "folder", 7, None, [], {}),
)
NUMBERS = (-1, 0, 1, 5, 1 << 20, 1 << 40, 1 << 53, 1 << 63, 1 << 70, 10**4000, True, 1.5, "2", None, [1])


def set_at(values: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


def box_edits(name: str, number: int) -> Iterator[tuple[str, Edit]]:
    at = (name, "boxes", number)
    for file in FILES:
        yield f"{at} file {file!r:.60}", of_index(functools.partial(set_at, path=(*at, "file"), value=file))
    for key in ("begin", "shape"):
        for dim in range(len(BOXES[name][number][0])):
            for value in NUMBERS:
                change = functools.partial(set_at, path=(*at, key, dim), value=value)
                yield f"{at} {key} {dim} {str(value)[:30]}", of_index(change)
        for value in ([], [0], [0, 0, 0], [0] * 70, "0,0", 0, None, {}):
            yield f"{at} {key} {value}", of_index(functools.partial(set_at, path=(*at, key), value=value))
    for key in ("begin", "shape", "file"):
        yield f"{at} without {key}", of_index(lambda t, key=key: t[name]["boxes"][number].pop(key))
    yield f"{at} removed", of_index(lambda t: t[name]["boxes"].pop(number))
    yield f"{at} twice", of_index(lambda t: t[name]["boxes"].append(t[name]["boxes"][number]))
    yield f"{at} with more", of_index(lambda t: t[name]["boxes"][number].update(more=1))
    yield f"{at} a list", of_index(functools.partial(set_at, path=at, value=[]))


def tensor_edits(name: str) -> Iterator[tuple[str, Edit]]:
    for dim in range(len(BOXES[name][0][0])):
        for value in NUMBERS:
            change = functools.partial(set_at, path=(name, "shape", dim), value=value)
            yield f"{name} shape {dim} {str(value)[:30]}", of_index(change)
    for value in ([], [24], [4, 6], [2, 3, 4], [1 << 40, 1 << 40], [-6, -4], None, "6", {}):
        yield f"{name} shape {value}", of_index(functools.partial(set_at, path=(name, "shape"), value=value))
    for dtype in ("F64", "F16", "BF16", "I32", "U32", "F4", "C64", "F8_E4M3", "", "float32", "\0", 7, None, [], {}):
        yield f"{name} dtype {dtype!r}", of_index(functools.partial(set_at, path=(name, "dtype"), value=dtype))
    for key in ("dtype", "shape", "boxes"):
        yield f"{name} without {key}", of_index(lambda t, key=key: t[name].pop(key))
    for boxes in ([], {}, None, 3, "x", [1], [[]]):
        yield f"{name} boxes {boxes}", of_index(functools.partial(set_at, path=(name, "boxes"), value=boxes))
    for other in (f"{name}\0", name.upper(), "", "x" * 2000, f"{name}@0", "rng.0.python", "rng.9.python", "recipe.9.x"):
        yield f"{name} as {other[:30]!r}", of_index(lambda t, other=other: t.update({other: t.pop(name)}))
    for other in ("model.more", "more", "rng.2.torch", "recipe.00.x", "rng.x.y", "rng."):
        yield f"{name} also as {other}", of_index(lambda t, other=other: t.update({other: copy.deepcopy(t[name])}))
    for boxes in overlaps(name):
        value = [{"begin": b, "shape": s, "file": "rank-00000.safetensors"} for b, s in boxes]
        yield f"{name} boxes {boxes}", of_index(functools.partial(set_at, path=(name, "boxes"), value=value))


def overlaps(name: str) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Boxes whose elements are as many as there should be, some twice and some not at all; and others."""
    if name.endswith(".step"):
        return
    yield [([0, 0], [2, 4]), ([0, 0], [4, 4])]
    yield [([0, 0], [2, 4]), ([1, 0], [4, 4])]
    yield [([0, 0], [3, 3]), ([0, 2], [3, 1]), ([3, 0], [3, 3]), ([3, 3], [3, 1])]
    yield [([0, 0], [3, 3]), ([3, 0], [3, 4]), ([0, 3], [1, 1]), ([0, 3], [1, 1]), ([2, 3], [1, 1])]
    yield [([0, 0], [6, 4]), ([0, 0], [0, 4])]
    yield [([0, 0], [6, 5])]
    yield [([0, 0], [12, 2])]
    yield [([-1, 0], [7, 4])]


def text_edits(text: bytes) -> Iterator[tuple[str, Edit]]:
    chance = random.Random(1)
    for number in range(160):
        place, byte = chance.randrange(len(text)), chance.choice(b'"[]{},:0192- \0\x80\xffaN\\')

        def replaced(data: bytes, place: int = place, byte: int = byte) -> bytes:
            return data[:place] + bytes([byte]) + data[place + 1 :]

        yield f"text {number}: {place} {byte}", of_text(replaced)
        yield f"text {number} cut at {place}", of_text(lambda data, place=place: data[:place])
    for what, data in {
        "empty": b"",
        "a BOM": b"\xef\xbb\xbf" + text,
        "UTF-16": text.decode().encode("utf-16"),
        "deep": b"[" * 100_000,
        "deep inside": text.replace(b"[6, 4]", b"[" * 5000 + b"]" * 5000, 1),
        "a long number": text.replace(b"6", b"6" * 5000, 1),
        "NaN": text.replace(b"6", b"NaN", 1),
        "1e999": text.replace(b"6", b"1e999", 1),
        "a key twice": text.replace(b'"tensors"', b'"tensors": {}, "tensors"', 1),
        "a further key": text.replace(b'"tensors"', b'"more": {}, "tensors"', 1),
        "another key": text.replace(b'"tensors"', b'"tensor"', 1),
        "no object": b"[]",
        "twice": text + text,
        "many": b'{"tensors": {"a": [' + b"0," * 600_000 + b"0]}}",
        "null": b"null",
    }.items():
        yield what, of_text(lambda _, data=data: data)


def file_edits() -> Iterator[tuple[str, Edit]]:
    row = "model.rows@2,0"
    yield "a box is not stored", of_file(lambda t: t.pop(row))
    yield "a box is smaller than said", of_file(lambda t: t.update({row: t[row][:3]}))
    yield "a box is larger than said", of_file(lambda t: t.update({row: torch.cat([t[row], t[row]])}))
    yield "a box is transposed", of_file(lambda t: t.update({row: t[row].view(2, 8)}))
    yield "a box has another dtype", of_file(lambda t: t.update({row: t[row].double()}))
    yield "a box has another dtype of this size", of_file(lambda t: t.update({row: t[row].view(torch.int32)}))
    yield "a box is the other file's", of_file(lambda t: t.update({"model.rows@0,0": torch.zeros(2, 4)}))
    for name in ("index.json", "rank-00001.safetensors"):
        for what, make in {
            "a folder": Path.mkdir,
            "a link outside": lambda path: path.symlink_to(path.parents[2] / "secret.safetensors"),
            "a link to itself": lambda path: path.symlink_to(path.name),
            "gone": lambda path: None,
            "empty": lambda path: path.write_bytes(b""),
        }.items():

            def become(folder: Path, name: str = name, make: Callable[[Path], object] = make) -> None:
                (folder / "parts" / name).unlink()
                make(folder / "parts" / name)

            yield f"{name} {what}", become


def cases(original: Path) -> list[tuple[str, Edit]]:
    found: list[tuple[str, Edit]] = []
    for name, boxes in BOXES.items():
        found += tensor_edits(name)
        for number in range(len(boxes)):
            found += box_edits(name, number)
    return [*found, *text_edits((original / "parts/index.json").read_bytes()), *file_edits()]


def test_edits_of_the_index_are_told(original: Path, tmp_path: Path) -> None:
    """A part of them; the next test makes all."""
    assert not assert_told(original, tmp_path, "nothing", lambda folder: None)
    found = cases(original)
    assert len(found) >= 900
    for name, edit in [*found[::23], *file_edits()]:
        assert_told(original, tmp_path, name, edit)
    for name, edit in [e for box in BOXES for e in tensor_edits(box) if "boxes" in e[0]]:
        assert assert_told(original, tmp_path, name, edit), f"{name} was not noticed"


@pytest.mark.slow
def test_all_edits_of_the_index_are_told(original: Path, tmp_path: Path) -> None:
    assert sum(assert_told(original, tmp_path, name, edit) for name, edit in cases(original)) > 900


def test_a_file_outside_of_the_folder_is_not_read(original: Path, tmp_path: Path) -> None:
    """Its tensors have the right names and shapes."""
    shutil.copy(original.parent / "secret.safetensors", tmp_path / "secret.safetensors")
    for file in (str(tmp_path / "secret.safetensors"), "../../secret.safetensors"):
        folder = tmp_path / original.name
        shutil.copytree(original, folder, dirs_exist_ok=True)
        of_index(functools.partial(set_at, path=("model.rows", "boxes", 0, "file"), value=file))(folder)
        seal(folder)
        with pytest.raises(TrainingCheckpointError, match="is not a plain file name inside the folder"):
            read(folder)


def test_boxes_tile_or_not_whatever_their_cut() -> None:
    """Against counting each element."""
    chance = random.Random(0)
    for _ in range(400):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
        boxes = []
        whole = [tuple((0, n) for n in shape)]
        while whole:  # cut at random
            box = whole.pop()
            dim = chance.randrange(len(shape))
            begin, end = box[dim]
            if end - begin > 1 and chance.random() < 0.7:
                middle = chance.randint(begin + 1, end - 1)
                whole += [(*box[:dim], part, *box[dim + 1 :]) for part in ((begin, middle), (middle, end))]
            else:
                boxes.append(tuple(Range(*r) for r in box))
        if chance.random() < 0.5:  # move or change one
            number = chance.randrange(len(boxes))
            boxes[number] = tuple(Range(r.start, max(r.start, r.stop + chance.randint(-1, 1))) for r in boxes[number])
        count = torch.zeros([n + 4 for n in shape], dtype=torch.int64)
        for box in boxes:
            count[tuple(slice(r.start, r.stop) for r in box)] += 1
        inside = count[tuple(slice(0, n) for n in shape)]
        assert tiles(boxes, shape) == bool((inside == 1).all() and count.sum() == inside.sum()), (shape, boxes)
