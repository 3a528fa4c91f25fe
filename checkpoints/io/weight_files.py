"""Find a folder's safetensors files, single or sharded, and open them; never follow a path out of the folder."""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from te_models.sizes import format_size, plural

from .errors import CheckpointError, quote, shorten
from .store import FileStore
from .strict_json import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"
"""The one folder inside a model folder whose files are read."""

_MOST_SPARSE = 16 << 30
"""Bytes that a file may have however little of them is stored: hashing more zeros than that takes seconds."""
_MOST_HOLES = 16
"""Of larger files: how many times the stored bytes they may have. A file system that compresses stores long runs of
zeros as holes, and no weights consist of them."""

_NUMBERED = re.compile(r"(.*?)(\d{1,9})(-of-\d{1,9})(.*)")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def open_weights(folder: Path) -> FileStore:
    """Open the weights of a folder: `model.safetensors`, the shards that `model.safetensors.index.json` names, or where
    there is neither, all its `*.safetensors` files, whose headers say the same as an index would."""
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        if (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is out of date")
        return _open_sharded(folder)
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return FileStore({SINGLE: plain_file(folder, SINGLE)})
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    if files:
        check_numbers(folder, files)
        return FileStore({name: plain_file(folder, name) for name in files})
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has only pickled weights ({shorten(pickles, 2)}), which can run code when loaded and are not "
            "read here; ask for a safetensors release, or load it with torch.load(..., weights_only=True) and save it "
            "again with safetensors.torch.save_file"
        )
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE}, nor {INDEX}, nor other *.safetensors files")


def check_numbers(folder: object, files: list[str]) -> None:
    """Raise CheckpointError where the names of numbered shards say that some are missing."""
    for name in files:
        numbered = _NUMBERED.fullmatch(name)
        if numbered is not None:
            before, total, after = numbered[1], numbered[3], numbered[4]
            count = int(total.removeprefix("-of-"))
            if count > len(files):
                raise CheckpointError(
                    f"{folder} has {plural(len(files), 'weight file')}, and {name!r} is one of {count}"
                )
            names = (f"{before}{number:0{len(numbered[2])}d}{total}{after}" for number in range(1, count + 1))
            missing = [name for name in names if name not in files]
            if missing:
                raise CheckpointError(f"{folder} lacks the weight files {shorten(missing)}")
            return


def read_index(path: Path) -> dict[str, str]:
    """Return which file holds each tensor, as an index says it; CheckpointError for one that does not."""
    weight_map = read_object(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map from tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{INDEX} maps {quote(name)} to something that is not a file name")
    return weight_map


def check_index(store: FileStore, weight_map: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the files hold exactly the tensors of an index, each where it says."""
    for name, file in weight_map.items():
        if store.file_of.get(name) != file:
            raise CheckpointError(f"{INDEX} says that {file} holds {quote(name)}, and it does not")
    unlisted = [name for name in store.tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"the shards hold tensors that {INDEX} does not list: {shorten(unlisted)}")


def _open_sharded(folder: Path) -> FileStore:
    weight_map = read_index(plain_file(folder, INDEX))
    files = sorted(set(weight_map.values()))
    store = FileStore({file: plain_file(folder, file, INDEX) for file in files}, weight_map)
    try:
        check_index(store, weight_map)
    except CheckpointError:
        store.close()
        raise
    return store


def plain_file(folder: Path, name: str, named_by: str | None = None, *, sparse: bool = False) -> Path:
    """Return the path of a regular file directly inside `folder`, refusing anything that leads elsewhere.

    A symbolic link must end in the folder itself, or in the `blobs` folder of a Hugging Face hub cache when the folder
    is a `snapshots/<revision>` of that cache, as the hub client stores every download. sparse: whether a
    file may consist of holes, of which the reader reads little.
    """
    source = f"{named_by} names the file {quote(name)}, which" if named_by else f"{name} of {folder}"
    if not is_file_name(name):
        raise CheckpointError(f"{source} is not a plain file name inside the folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
        info = real.stat()
    except OSError:
        raise CheckpointError(f"{source} does not exist") from None
    except RuntimeError:
        raise CheckpointError(f"{source} is a symbolic link to itself") from None
    if path.is_symlink() and real.parent not in _allowed_targets(folder):
        raise CheckpointError(f"{source} is a symbolic link that leaves the folder")
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{source} is not a regular file")
    most = max(_MOST_SPARSE, _MOST_HOLES * 512 * info.st_blocks)
    if not sparse and info.st_size > most and _has_hole(real):
        size, stored = format_size(info.st_size), format_size(512 * info.st_blocks)
        raise CheckpointError(f"{source} has {size}, of which {stored} are stored: one of holes is not read")
    return path


def is_file_name(name: str) -> bool:
    """Whether a name that a stranger wrote can be one of a file in a folder, printed and written on any system."""
    plain = name not in ("", ".", "..") and not any(c in name for c in "/\\\0") and name.isprintable()
    return plain and len(name.encode()) <= 255


def _has_hole(path: Path) -> bool:
    """Whether a file has parts that are not stored; False where the system does not say."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < os.fstat(fd).st_size
    except (OSError, AttributeError):
        return False
    finally:
        os.close(fd)


def file_inside(folder: Path, name: str, named_by: str | None = None) -> Path:
    """As `plain_file`, and for `additional_chat_templates/NAME` a file directly inside that folder."""
    template = name.removeprefix(f"{TEMPLATES}/")
    if template == name:
        return plain_file(folder, name, named_by)
    if (folder / TEMPLATES).is_symlink():
        raise CheckpointError(f"{TEMPLATES} of {folder} is a symbolic link, not a folder")
    return plain_file(folder / TEMPLATES, template, named_by)


def _allowed_targets(folder: Path) -> Iterable[Path]:
    real = folder.resolve()
    yield real
    snapshot = real.parent if real.name == TEMPLATES else real
    if snapshot.parent.name == "snapshots":
        yield snapshot.parent.parent / "blobs"
