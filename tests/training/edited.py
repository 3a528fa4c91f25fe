"""Training checkpoints that were changed by hand: files, values and tensors, with and without a manifest made anew."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes, record_files
from te_models.training.checkpoints.checks import TENSORS, VALUES, manifest_paths

Edit = Callable[[Path], object]


def seal(folder: Path) -> None:
    """Make the manifest of a checkpoint say what is there now, as somebody who edits one on purpose would."""
    (folder / MANIFEST).write_bytes(manifest_bytes(record_files(manifest_paths(folder))))


def make_version_1(folder: Path) -> None:
    """Make a checkpoint what releases before manifests wrote."""
    (folder / MANIFEST).unlink()
    edit_values(folder, lambda values: values.update(version=1))


def edit_values(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change training.json."""
    values = json.loads((folder / VALUES).read_text())
    change(values)
    (folder / VALUES).write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change training.safetensors; its metadata stays."""
    with safe_open(folder / TENSORS, "pt") as file:
        metadata = file.metadata()
    tensors = {name: value.clone() for name, value in load_file(folder / TENSORS).items()}
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / TENSORS, metadata=metadata)


@dataclass(frozen=True)
class Case:
    """One edit. sealed: the manifest is made anew after it, so that only the values can tell. harmless: what nothing of
    the run depends on, so that the run may also go on, with the same numbers."""

    name: str
    edit: Edit
    sealed: bool = True
    harmless: bool = False

    def __call__(self, folder: Path) -> None:
        """Do it."""
        self.edit(folder)
        if self.sealed:
            seal(folder)


_COMPARED = {"seed", "model", "data", "optimizer", "schedule", "precision"}
_NOT_COMPARED = {"activation_checkpointing", "loss_chunk_tokens", "skip_nonfinite", "moe_router_bias_update_rate"}
_OTHERS: dict[str, Any] = {"list": [], "text": "x", "object": {"a": 1}, "null": None, "fraction": 1.5, "truth": True}


def value_cases(values: dict[str, Any]) -> Iterator[Case]:
    """Yield edits of training.json: each key removed, renamed, of another type; numbers out of range."""

    def at(path: tuple[str, ...], change: Callable[[dict[str, Any], str], object], folder: Path) -> None:
        def apply(found: dict[str, Any]) -> None:
            for key in path[:-1]:
                found = found[key]
            change(found, path[-1])

        edit_values(folder, apply)

    def put(value: Any, table: dict[str, Any], key: str) -> None:
        table[key] = value

    paths = [(key,) for key in values] + [("config", key) for key in values["config"]]
    paths += [("config", t, key) for t, v in values["config"].items() if isinstance(v, dict) for key in v]
    for path in paths:
        harmless = len(path) > 1 and (path[1] not in _COMPARED or path[-1] in _NOT_COMPARED)
        name = ".".join(path)
        old = values
        for key in path:
            old = old[key]
        yield Case(f"{name} removed", partial(at, path, lambda table, key: table.pop(key)), harmless=harmless)
        renamed = partial(at, path, lambda table, key: table.update({key + "_": table.pop(key)}))
        yield Case(f"{name} renamed", renamed, harmless=harmless)
        for kind, other in _OTHERS.items():
            if len(path) < 3 or kind in ("list", "object"):
                same = other == old and type(other) is type(old)
                yield Case(f"{name} as {kind}", partial(at, path, partial(put, other)), harmless=harmless or same)
    step, position = values["step"], values["position"]
    for key, others in {
        "version": (0, 3, -1),
        "step": (0, -1, step - 1, step + 1, 2**53, 2**64, 10**400),
        "position": (-1, 0, position - 1, position + 1, 2 * position, 2**70),
        "world_size": (0, -1, 2, 2**40, 2**70),
    }.items():
        for other in others:
            yield Case(f"{key} as {str(other)[:20]}", partial(at, (key,), partial(put, other)))
    yield Case("not an object", lambda folder: (folder / VALUES).write_text("[]"))
    yield Case("not JSON", lambda folder: (folder / VALUES).write_text("{"))
    yield Case("empty text", lambda folder: (folder / VALUES).write_text(""))
    yield Case("not UTF-8", lambda folder: (folder / VALUES).write_bytes(b"{\xff}"))
    yield Case("deep", lambda folder: (folder / VALUES).write_text("[" * 100_000))


def tensor_cases(tensors: dict[str, torch.Tensor]) -> Iterator[Case]:
    """Yield edits of training.safetensors: each tensor removed, renamed, of another shape, dtype and range."""

    def change(function: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
        return lambda folder: edit_tensors(folder, function)

    def replace(name: str, value: torch.Tensor) -> Edit:
        return change(lambda found: found.update({name: value}))

    yield Case("a tensor more", replace("other", torch.zeros(2)))
    yield Case("a moment more", replace("optimizer.none.exp_avg", torch.zeros(2)))
    yield Case("a rank more", replace("rng.1.torch", tensors["rng.0.torch"]))
    yield Case("no rank", replace("rng.x.torch", tensors["rng.0.torch"]))
    yield Case("no tensors", change(lambda found: found.clear()))
    yield Case("a generator more", replace("rng.0.numpy", torch.zeros(8, dtype=torch.uint8)))
    for name, value in tensors.items():
        key = name.rpartition(".")[2]
        yield Case(f"{name} removed", change(_pop(name)))
        yield Case(f"{name} renamed", change(_rename(name)))
        shapes = {"a dimension more": value[None], "one of its values": value.reshape(-1)[:1]}
        if value.dim() > 1:
            shapes |= {"its first row": value[:1], "transposed": value.mT.contiguous()}
        for kind, other in shapes.items():
            if other.shape != value.shape:
                yield Case(f"{name}: {kind}", replace(name, other.clone()))
        for dtype in (torch.float64, torch.float16, torch.int32):
            if value.dtype is not dtype:
                yield Case(f"{name} as {dtype}", replace(name, value.to(dtype)))
        if key in ("exp_avg", "exp_avg_sq", "master", "step", "fp8_scale") or key.endswith("scale_inv"):
            yield Case(f"{name}: NaN", replace(name, torch.full_like(value.float(), float("nan")).to(value.dtype)))
        if key in ("exp_avg_sq", "step", "fp8_scale", "fp8_history", "fp8_amax") or key.endswith("scale_inv"):
            yield Case(f"{name}: negative", replace(name, torch.full_like(value.float(), -1.0).to(value.dtype)))
        if key == "step":
            yield Case(f"{name}: too many", replace(name, torch.full_like(value, 1e6)))
            yield Case(f"{name}: a fraction", replace(name, torch.full_like(value, 0.5)))
        if name.startswith("rng."):
            yield Case(f"{name}: no state", replace(name, torch.full_like(value, 255)))


def _pop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda found: found.pop(name)


def _rename(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda found: found.update({name + "_": found.pop(name)})


def file_cases(folder: Path, other: Path) -> Iterator[Case]:
    """Yield whole files removed, cut, emptied or replaced, with the manifest as it is."""
    files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())

    def cut(name: Path, size: int, where: Path) -> None:
        os.truncate(where / name, size)

    def become(name: Path, make: Callable[[Path], object], where: Path) -> None:
        (where / name).unlink()
        make(where / name)

    def from_other(name: Path, where: Path) -> None:
        shutil.copy(other / name, where / name)

    for name in files:
        size = (folder / name).stat().st_size
        yield Case(f"{name} removed", partial(become, name, lambda path: None), sealed=False)
        yield Case(f"{name} cut", partial(cut, name, size // 2), sealed=False)
        yield Case(f"{name} without its last byte", partial(cut, name, size - 1), sealed=False)
        yield Case(f"{name} longer", partial(cut, name, size + 1), sealed=False)
        yield Case(f"{name} empty", partial(cut, name, 0), sealed=False)
        yield Case(f"{name} a folder", partial(become, name, Path.mkdir), sealed=False)
        yield Case(f"{name} a pipe", partial(become, name, os.mkfifo), sealed=False)
        outside = (other / name).resolve()
        yield Case(f"{name} a link", partial(become, name, lambda path, to=outside: path.symlink_to(to)), sealed=False)
        if (folder / name).read_bytes() != (other / name).read_bytes():
            yield Case(f"{name} of another step", partial(from_other, name), sealed=False)
    for name in ("added.json", "model/added.safetensors", "model/added.json", "added.safetensors"):
        yield Case(f"{name} added", lambda where, name=name: (where / name).write_bytes(b"{}"), sealed=False)
    yield Case("a folder added", lambda where: (where / "model" / "more").mkdir(), sealed=False)
    for inside in ("", "model"):
        everything = partial(_replace_folder, other / inside, inside)
        yield Case(f"all of {inside or 'it'} of another step", everything, sealed=False)
    yield Case("the model removed", lambda where: shutil.rmtree(where / "model"), sealed=False)
    yield Case(f"{TENSORS} of another step, sealed", partial(from_other, Path(TENSORS)))
    yield Case(f"{VALUES} of another step, sealed", partial(from_other, Path(VALUES)))
    yield Case(
        "version 1 with the manifest", lambda where: edit_values(where, lambda v: v.update(version=1)), sealed=False
    )


def _replace_folder(other: Path, inside: str, where: Path) -> None:
    shutil.rmtree(where / inside)
    shutil.copytree(other, where / inside)
