"""Find a folder's safetensors files, single or sharded, and open them; never follow a path out of the folder."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from .errors import CheckpointError, shorten
from .store import FileStore
from .strict_json import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def open_weights(folder: Path) -> FileStore:
    """Open the weights of a folder: `model.safetensors`, or the shards that `model.safetensors.index.json` names."""
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        if (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is out of date")
        return _open_sharded(folder)
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return FileStore({SINGLE: plain_file(folder, SINGLE)})
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has only pickled weights ({shorten(pickles, 2)}), which can run code when loaded and are not "
            "read here; ask for a safetensors release, or load it with torch.load(..., weights_only=True) and save it "
            "again with safetensors.torch.save_file"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _open_sharded(folder: Path) -> FileStore:
    index = read_object(plain_file(folder, INDEX), INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map from tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{INDEX} maps {name!r} to something that is not a file name")
    files = sorted(set(weight_map.values()))
    store = FileStore({file: plain_file(folder, file, INDEX) for file in files})
    try:
        for name, file in weight_map.items():
            if store.file_of.get(name) != file:
                raise CheckpointError(f"{INDEX} says that {file} holds {name!r}, and it does not")
        unlisted = [name for name in store.tensors if name not in weight_map]
        if unlisted:
            raise CheckpointError(f"the shards hold tensors that {INDEX} does not list: {shorten(unlisted)}")
    except CheckpointError:
        store.close()
        raise
    return store


def plain_file(folder: Path, name: str, named_by: str | None = None) -> Path:
    """Return the path of a regular file directly inside `folder`, refusing anything that leads elsewhere.

    A symbolic link must end in the folder itself, or in the `blobs` folder of a Hugging Face hub cache when the folder
    is a `snapshots/<revision>` of that cache, which is how the hub client stores every download.
    """
    source = f"{named_by} names the file {name!r}, which" if named_by else f"{name} of {folder}"
    if name in ("", ".", "..") or any(c in name for c in "/\\\0") or not name.isprintable():
        raise CheckpointError(f"{source} is not a plain file name inside the folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except OSError:
        raise CheckpointError(f"{source} does not exist") from None
    except RuntimeError:
        raise CheckpointError(f"{source} is a symbolic link to itself") from None
    if path.is_symlink() and real.parent not in _allowed_targets(folder):
        raise CheckpointError(f"{source} is a symbolic link that leaves the folder")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{source} is not a regular file")
    return path


def _allowed_targets(folder: Path) -> Iterable[Path]:
    real = folder.resolve()
    yield real
    if real.parent.name == "snapshots":
        yield real.parent.parent / "blobs"
