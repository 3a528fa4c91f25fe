"""Edits of a folder's manifest.json: refused in one sentence, or of no effect; and files that are mostly holes."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import CheckpointError, check_manifest, import_hf, open_checkpoint
from te_models.checkpoints.io.manifest import MANIFEST
from te_models.checkpoints.io.weight_files import SINGLE, plain_file
from tests.checkpoints.hf_cases import HFFolder

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 2, 1 << 40, 1 << 63, 10**4000),
    *("", "0" * 64, "F" * 64, "x", [], {}, [[]]),
)
NAMES = (
    *("a" * 255, "a" * 256, "a" * 300, "ä" * 128, "additional_chat_templates/" + "a" * 300, "../secret", "/etc/passwd"),
    *(
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        "\ud800",
        "config.json/",
        "./config.json",
        MANIFEST,
        "link",
        "pipe",
    ),
)


def paths(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of the manifest, of tensors the first three."""
    for key in list(values)[:3] if at[-1:] == ("tensors",) else values:
        yield (*at, key)
        if isinstance(values[key], dict):
            yield from paths(values[key], (*at, key))


def edits(text: str) -> Iterator[tuple[str, bytes]]:
    """Yield a name and the new content of manifest.json."""
    values = json.loads(text)
    for path in paths(values):
        for value in (*VALUES, KeyError):
            changed = copy.deepcopy(values)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if value is KeyError:
                inner.pop(path[-1])
            else:
                inner[path[-1]] = value
            yield f"{path} {str(value)[:30]}", json.dumps(changed).encode()
    for file in values["files"]:
        for name in NAMES:
            for kept in (False, True):
                changed = copy.deepcopy(values)
                changed["files"][name] = changed["files"][file] if kept else changed["files"].pop(file)
                yield f"{file} as {name[:20]!r}, {kept}", json.dumps(changed).encode()
    chance, data = random.Random(0), text.encode()
    for _ in range(120):
        place, byte = chance.randrange(len(data)), chance.choice(b'"[]{},:019- \0\x80\xff\\')
        yield f"byte {place} {byte}", data[:place] + bytes([byte]) + data[place + 1 :]
        yield f"cut at {place}", data[:place]
    yield "a BOM", b"\xef\xbb\xbf" + data
    yield "UTF-16", text.encode("utf-16")
    yield "deep", b"[" * 100_000
    yield "a key twice", data.replace(b'"files"', b'"files": {}, "files"', 1)
    yield "a long number", data.replace(b'"format_version": 3', b'"format_version": ' + b"3" * 5000)
    yield "many", b'{"files": [' + b"0," * 600_000 + b"0]}"


def assert_told(folder: Path, name: str, content: bytes) -> int:
    """How many of the two that read a manifest refuse it: all of the folder, and what is read of its weights."""
    (folder / MANIFEST).write_bytes(content)
    refused = 0
    for read in (check_manifest, load):
        try:
            read(folder)
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 900, (name, str(error))
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}, {read.__name__}: {type(error).__name__}: {error}") from error
    return refused


def load(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.load_into({name: torch.empty(i.shape) for name, i in checkpoint.tensors.items()})


def made(hf_folder: HFFolder, tmp_path: Path) -> tuple[Path, list[tuple[str, bytes]]]:
    import_hf(hf_folder("llama"), tmp_path / "ours")
    text = (tmp_path / "ours" / MANIFEST).read_text()
    (tmp_path / "secret").write_text("{}")
    return tmp_path / "ours", [*edits(text)]


def test_edits_of_a_manifest_are_told(hf_folder: HFFolder, tmp_path: Path) -> None:
    """A part of them; the next test makes all."""
    folder, found = made(hf_folder, tmp_path)
    assert len(found) > 700
    names = [(name, content) for name, content in found if " as " in name and "300" not in name]
    for name, content in [*found[::40], *names[:: len(names) // 30]]:
        assert_told(folder, name, content)


@pytest.mark.slow
def test_all_edits_of_a_manifest_are_told(hf_folder: HFFolder, tmp_path: Path) -> None:
    folder, found = made(hf_folder, tmp_path)
    assert sum(assert_told(folder, name, content) > 0 for name, content in found) > 650


@pytest.mark.parametrize("name", ["a" * 300, "additional_chat_templates/" + "a" * 300])
def test_names_that_no_file_can_have(llama: Path, tmp_path: Path, name: str) -> None:
    import_hf(llama, tmp_path / "ours")
    values = json.loads((tmp_path / "ours" / MANIFEST).read_text())
    values["files"][name] = values["files"]["config.json"]
    assert assert_told(tmp_path / "ours", name, json.dumps(values).encode()) == 2


def test_a_terabyte_of_holes_is_not_read(llama: Path, tmp_path: Path) -> None:
    """Small files, weights whose header says so, and files that nobody lists."""
    import_hf(llama, tmp_path / "ours")
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (1 << 40, 1 << 40)
    for name, begin in (("config.json", b""), (SINGLE, len(header).to_bytes(8, "little") + header), ("more", b"")):
        folder = tmp_path / "copy"
        shutil.copytree(tmp_path / "ours", folder)
        with (folder / name).open("wb") as file:
            file.write(begin)
            file.truncate(len(begin) + (1 << 40))
        values = json.loads((folder / MANIFEST).read_text())
        entry = values["files"].get(name, values["files"]["config.json"])
        values["files"][name] = entry | {"bytes": len(begin) + (1 << 40)}
        assert assert_told(folder, name, json.dumps(values).encode()) >= 1
        with pytest.raises(
            CheckpointError, match=r"has 1,024\.0 GiB, of which .* are stored: one of holes is not read"
        ):
            plain_file(folder, name)
        shutil.rmtree(folder)
    with (tmp_path / "small").open("wb") as file:
        file.truncate(1 << 20)
    plain_file(tmp_path, "small")
