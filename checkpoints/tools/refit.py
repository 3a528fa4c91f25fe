"""Refit: the weights of a model that is trained pushed into a folder of another format or layout, in place.

The folder is made again beside itself, by the conversions that made it, and compared file by file: files whose bytes
are the same are not touched, the others are replaced by renaming, manifest.json last. A reader that has a file open
keeps the old one; a folder that was killed in between is found by its manifest (`verify`), and refitted again.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..folder.checkpoint import MODEL_TYPE
from ..io.atomic import replace_text, replaced_file
from ..io.errors import CheckpointError
from ..io.manifest import MANIFEST, check_manifest, manifest_bytes, read_manifest
from ..io.strict_json import read_object
from .convert import export_hf
from .quantize import quantize


class Saveable(Protocol):
    """A model in memory, as `GPTModel` is one."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None: ...


@dataclass(frozen=True)
class Refit:
    """What `refit` did. replaced, unchanged: names of weight files; tensors: names of those whose values changed."""

    replaced: tuple[str, ...]
    unchanged: tuple[str, ...]
    tensors: tuple[str, ...]


def refit(
    source: Saveable | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    check: bool = True,
    **options: Any,
) -> Refit:
    """Push the weights of a model into a folder that was made from an earlier state of it, and return what changed.

    source: a `GPTModel`, or a te_models folder. folder: a te_models folder (made by `quantize` with `recipe`, or saved
    without one), or a Hugging Face folder, made by `export_hf` with `options`, of a folder that was quantized with
    `recipe` first where that is given. check: read the folder again at the end, and compare every digest. The result is
    what a fresh export gives, bit for bit; files that would not change are not written.

    Raises CheckpointError, before anything of the folder is replaced, where the conversions give other files, tensors,
    dtypes or shapes than the folder has: it was made otherwise.
    """
    target = Path(folder)
    if not (target / MANIFEST).is_file():
        raise CheckpointError(f"{target} has no {MANIFEST}; allowed: a folder that te_models wrote")
    working = target.parent / f".{target.name}.refit"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        fresh = _converted(source, working, target, recipe, options)
        return _replaced(fresh, target, check=check)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _converted(source: Any, working: Path, target: Path, recipe: str | None, options: Mapping[str, Any]) -> Path:
    """Make the folder again in `working`, and return where."""
    fresh = Path(source) if isinstance(source, (str, os.PathLike)) else working / "model"
    if not isinstance(source, (str, os.PathLike)):
        source.save_pretrained(fresh)
    if recipe is not None:
        quantize(fresh, working / "quantized", recipe)
        fresh = working / "quantized"
    if read_object(target / "config.json").get("model_type") != MODEL_TYPE:
        export_hf(fresh, working / "exported", **options)
        return working / "exported"
    if options:
        raise CheckpointError(f"{target} is a te_models folder; allowed without an export: no {', '.join(options)}")
    return fresh


def _replaced(fresh: Path, target: Path, *, check: bool) -> Refit:
    """Take over what differs, file by file, and say what that was."""
    new, old = read_manifest(fresh), read_manifest(target)
    weights = {name: record for name, record in new.items() if record.of_weights}
    other = next(iter(sorted(weights.keys() ^ {name for name, record in old.items() if record.of_weights})), None)
    other = other or next((name for name, r in weights.items() if r.header != old[name].header), None)
    if other is not None:
        raise CheckpointError(
            f"{target} was made otherwise: {other} would have other tensors; allowed: the recipe and options that the "
            "folder was made with"
        )
    replaced = [name for name, record in new.items() if record != old.get(name) or not (target / name).is_file()]
    for name in replaced:
        with replaced_file(target / name) as beside:
            shutil.copyfile(fresh / name, beside)
    if replaced:
        replace_text(target / MANIFEST, manifest_bytes({**old, **new}, partial=old.partial).decode())
    if check:
        check_manifest(target)
    tensors = tuple(t for name, r in weights.items() for t in r.tensors if r.tensors[t] != old[name].tensors.get(t))
    unchanged = tuple(name for name in weights if name not in replaced)
    return Refit(tuple(name for name in weights if name in replaced), unchanged, tensors)
