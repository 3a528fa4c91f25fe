"""What a training checkpoint must be before a run continues from it: every byte as written, and its parts agreeing.

Two lines of defence. manifest.json says what each file was when it was written, so that every changed bit is noticed.
The values themselves are checked as well, because a checkpoint may have been put together by hand, manifest included,
or come from a release that wrote none: names, types, shapes and dtypes, ranges, the step against the folder's name, the
position against the step. What only the model knows, `Optimizer` and `saved_recipe_state` compare.
"""

import os
import random
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from te_models.checkpoints import CheckpointError, check_manifest
from te_models.checkpoints.io.errors import quote, shorten, shown_untrusted
from te_models.checkpoints.io.header import read_header
from te_models.checkpoints.io.manifest import MANIFEST, check_listed, read_manifest
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.io.weight_files import TEMPLATES, plain_file

from ...config import ModelConfig
from ...sizes import plural
from ..config import ParallelConfig, TrainConfig
from ..data.batch_size import BatchSize
from ..seeding import PYTHON_STATE, python_state

VERSION = 2
"""Of training.json. Checkpoints of version 1 have no manifest."""

SHARDED_VERSION = 4
"""Of a sharded checkpoint. Checkpoints of version 3 have another index, and all digests in manifest.json."""
SHARDED_VERSIONS = (3, SHARDED_VERSION)

MODEL, TENSORS, VALUES, PARTS = "model", "training.safetensors", "training.json", "parts"
NAME = re.compile(r"step-([0-9]{8,})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMIT = 2**53
_SIGNS = -0x7F7F7F7F7F7F7F80
"""The sign bits of eight bytes."""
_RNG = ("python", "torch", "cuda")
_TABLES = (
    *("model", "data", "parallel", "optimizer", "schedule", "precision", "checkpoint", "evaluation", "log"),
    "posttraining",
)


class TrainingCheckpointError(ValueError):
    """A training checkpoint cannot be used; the message is one sentence."""


def manifest_paths(folder: Path) -> dict[str, Path]:
    """Return what manifest.json of a checkpoint lists: the training state, and the manifest of the model; that lists
    the model's files. Raises CheckpointError for what is not a regular file in its place."""
    if (folder / MODEL).is_symlink() or not (folder / MODEL).is_dir():
        raise CheckpointError(f"{folder} has no folder {MODEL}")
    paths = {name: plain_file(folder, name) for name in (TENSORS, VALUES)}
    return paths | {f"{MODEL}/{MANIFEST}": plain_file(folder / MODEL, MANIFEST)}


def check_sharded_files(folder: Path, share: tuple[int, int]) -> None:
    """Check the files of a sharded checkpoint against its manifest, and that there are no others; of the parts only
    the ones that reader number `share[0]` of `share[1]` checks. Raises CheckpointError."""
    from .files import digests_of, part_files, sharded_paths

    paths, (number, readers) = sharded_paths(folder), share
    files = part_files(folder)
    others = {f"{PARTS}/{digests_of(file)}" for i, file in enumerate(files) if i % readers != number}
    if not files:  # of an earlier release
        others = {n for i, n in enumerate(paths) if not n.endswith(".json") and i % readers != number}
    check_listed(folder, paths, read={n: path for n, path in paths.items() if n not in others})
    for file in files[number::readers]:
        path = {file: plain_file(folder / PARTS, file)}
        check_listed(folder / PARTS, path, manifest=digests_of(file))
    others = {p.name for p in folder.iterdir() if not p.name.startswith(".")} - {MANIFEST, VALUES, PARTS}
    if others:
        raise CheckpointError(
            f"{MANIFEST} does not list {shorten(sorted(others))}; what a checkpoint does not hold is removed"
        )


def check_files(folder: Path) -> None:
    """Check every file of a checkpoint against its manifests, and that there are no others. Raises CheckpointError."""
    paths = manifest_paths(folder)
    check_listed(folder, paths)
    check_manifest(folder / MODEL)
    listed = {MANIFEST, *paths, *(f"{MODEL}/{name}" for name in read_manifest(folder / MODEL))}
    unlisted = sorted(_present(folder) - listed)
    if unlisted:
        raise CheckpointError(
            f"{MANIFEST} does not list {shorten(unlisted)}; what a checkpoint does not hold is removed"
        )


def _present(folder: Path) -> set[str]:
    """Return what is in a checkpoint, by relative name: files, and folders other than those a checkpoint has. Names
    that begin with a dot do not count: systems leave them behind, and nothing here reads them."""
    found: set[str] = set()
    for inside in ("", f"{MODEL}/", f"{MODEL}/{TEMPLATES}/"):
        if (folder / inside).is_dir():
            found |= {inside + path.name for path in (folder / inside).iterdir() if not path.name.startswith(".")}
    return found - {name for name in (MODEL, f"{MODEL}/{TEMPLATES}") if (folder / name).is_dir()}


def read_values(folder: Path, *, share: tuple[int, int] = (0, 1)) -> tuple[dict[str, Any], dict[str, str]]:
    """Return training.json and the metadata of training.safetensors of a checkpoint whose files have been checked,
    against the manifest that versions from 2 on have. share: see `check_sharded_files`. Raises TrainingCheckpointError.
    """
    try:
        has_manifest, is_sharded = os.path.lexists(folder / MANIFEST), os.path.lexists(folder / PARTS)
        if is_sharded:
            check_sharded_files(folder, share)
        elif has_manifest:
            check_files(folder)
        values = read_object(plain_file(folder, VALUES), VALUES)
        version = values.get("version")
        if type(version) is not int or version not in (SHARDED_VERSIONS if is_sharded else (1, VERSION)):
            allowed = "3 or 4" if is_sharded else "1 or 2"
            raise CheckpointError(
                f"checkpoint version {shown_untrusted(version)} is not one that this release reads, {allowed}"
            )
        if version > 1 and not has_manifest:
            raise CheckpointError(f"it has no {MANIFEST}")
        metadata = {} if is_sharded else read_header(plain_file(folder, TENSORS)).metadata
        _move_old_keys(values)
        check_training_state(values, metadata, folder.name)
    except (CheckpointError, OSError) as error:
        raise TrainingCheckpointError(f"{folder} cannot be used as a training checkpoint: {error}") from None
    if not has_manifest:
        warnings.warn(
            f"{folder} is a checkpoint of an earlier release, without a {MANIFEST}: damage to its numbers would not be "
            "noticed",
            stacklevel=2,
        )
    return values, metadata


def _integer(values: Mapping[str, Any], name: str, where: str, least: int) -> int:
    if name not in values:
        raise CheckpointError(f"{where} has no {name!r}")
    value = values[name]
    if type(value) is not int or not least <= value < _LIMIT:
        raise CheckpointError(f"{where} has {name} {shown_untrusted(value)}; allowed: an integer of at least {least}")
    return value


def check_training_state(values: Mapping[str, Any], metadata: Mapping[str, str], folder: str) -> None:
    """Check types and ranges of training.json, and that its step is the one of the folder's name and of the tensors,
    and that its position is the one that this many steps reach. Raises CheckpointError."""
    step, position, ranks = (
        _integer(values, name, VALUES, least) for name, least in (("step", 1), ("position", 0), ("world_size", 1))
    )
    named = NAME.fullmatch(folder)
    if named is None or int(named[1]) != step:
        raise CheckpointError(f"{VALUES} says step {step}, but the folder of that step would be named step-{step:08d}")
    if values["version"] == VERSION and metadata.get("step") != str(step):
        found = quote(metadata["step"]) if "step" in metadata else "none"
        raise CheckpointError(f"{VALUES} says step {step}, but the step in {TENSORS} is {found}")
    digest = values.get("data_digest")
    if values["version"] > 1 and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise CheckpointError(
            f"data_digest in {VALUES} is {shown_untrusted(digest)}; allowed: a SHA-256 in 64 hexadecimal digits"
        )
    config = values.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"config in {VALUES} is {shown_untrusted(config)}; allowed: an object")
    if values["version"] > 1:
        _check_config(config)
    for name in _TABLES:
        if not isinstance(config.get(name, {}), dict):
            raise CheckpointError(f"config.{name} in {VALUES} is {shown_untrusted(config[name])}; allowed: an object")
    if values["version"] in SHARDED_VERSIONS:
        own = _integer(values, "data_ranks", VALUES, 1)
        if ranks % own:
            raise CheckpointError(f"{VALUES} has data_ranks {own}; allowed: a divisor of world_size, {ranks}")
        _check_model_config(values.get("model_config"))
        ranks = own
    else:
        shared = (config.get("parallel") or {}).get("context_parallel_size", 1)
        if type(shared) is not int or shared < 1 or ranks % shared:
            where = f"config.parallel in {VALUES} has context_parallel_size"
            raise CheckpointError(f"{where} {shown_untrusted(shared)}; allowed: a divisor of world_size, {ranks}")
        ranks //= shared
    data, where = config.get("data", {}), f"config.data in {VALUES}"
    per_step = ranks * _integer(data, "micro_batch_size", where, 1) * _integer(data, "gradient_accumulation", where, 1)
    reached = step * per_step
    if data.get("rampup_batch_size"):  # whose types the whole configuration was checked for
        reached = BatchSize(per_step, ramp=tuple(data["rampup_batch_size"])).position(step)
    if position != reached:
        raise CheckpointError(
            f"{VALUES} says position {position}, but {plural(step, 'step')} of {plural(per_step, 'window')} reach "
            f"{reached}"
        )


def _move_old_keys(values: Mapping[str, Any]) -> None:
    """Move what earlier releases had elsewhere in the configuration to where it is now."""
    config = values.get("config")
    if isinstance(config, dict) and "parallel" not in config and "expert_model_parallel_size" in config:
        ranks = config.pop("expert_model_parallel_size")
        config["parallel"] = ParallelConfig().to_dict() | {"expert_model_parallel_size": ranks}


def _check_model_config(values: object) -> None:
    try:
        ModelConfig.from_dict(values)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"model_config in {VALUES} is none that a model can have: {error}") from None


def _check_config(config: dict[str, Any]) -> None:
    """Check that a run's configuration is one, with every key: what is compared with it must not be a default."""
    where = f"config in {VALUES}"
    try:
        whole = TrainConfig.from_dict(config).to_dict()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is none that a run can have: {error}") from None
    if missing := _missing(whole, config):
        raise CheckpointError(f"{where} has no {quote(missing)}")


def _missing(whole: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first key of `whole`, with the tables that it is in, that `found` lacks."""
    for name, value in whole.items():
        if name not in found:
            return name
        if isinstance(value, dict) and isinstance(found[name], dict) and (inner := _missing(value, found[name])):
            return f"{name}.{inner}"
    return None


def check_tensors(tensors: Mapping[str, torch.Tensor], step: int, ranks: int) -> None:
    """Check what can be without the model: which tensors there are for each rank, the random states, the step counts of
    the optimizer. Raises TrainingCheckpointError."""
    rng, recipe = by_rank(tensors, "rng."), by_rank(tensors, "recipe.")
    for name in tensors:
        if not name.startswith(("rng.", "recipe.", "optimizer.", "lora.")):
            raise TrainingCheckpointError(f"{TENSORS} holds {quote(name)}, which is no part of a training state")
    for what, found in (("rng", rng), ("recipe", recipe)):
        if wrong := sorted(rank for rank in found if rank not in map(str, range(min(ranks, len(tensors))))):
            raise TrainingCheckpointError(f"{TENSORS} holds {what} of rank {quote(wrong[0])} of {ranks}")
        first = found.get("0", {})
        for rank in map(str, range(ranks)):
            if found.get(rank, {}).keys() != first.keys():
                raise TrainingCheckpointError(f"{TENSORS} holds other {what} tensors of rank {rank} than of rank 0")
            if what == "rng":
                check_random_state(found.get(rank, {}), rank)
    for name, value in tensors.items():
        if name.startswith("optimizer.") and name.endswith(".step"):
            if value.dtype is not torch.float32 or value.shape != ():
                raise TrainingCheckpointError(f"{TENSORS} holds {quote(name)} as {_kind(value)}; allowed: float32 []")
            count = float(value)
            if not (0 <= count <= step and count == int(count)):
                raise TrainingCheckpointError(f"{TENSORS} has {quote(name)} {count} after {plural(step, 'step')}")


def by_rank(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors named PREFIX RANK . NAME, by rank, then by name; of recipes, the names of earlier releases."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        rank, _, own = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and (prefix != "recipe." or rank.isdigit()):
            found.setdefault(rank, {})[own] = value
    return found


def check_random_state(states: Mapping[str, torch.Tensor], rank: str) -> None:
    """Check that generators take the states of a rank, without changing any in use."""
    for name in ("python", "torch"):
        if name not in states:
            raise TrainingCheckpointError(f"{TENSORS} lacks 'rng.{rank}.{name}'")
    for name, state in states.items():
        try:
            if name not in _RNG or state.dtype is not torch.uint8 or state.dim() != 1:
                raise ValueError(_kind(state))
            if name == "python":
                if state.numel() != PYTHON_STATE.size:
                    raise ValueError(_kind(state))
                random.Random().setstate(python_state(state))
            elif name == "torch":
                torch.Generator().set_state(state)
        except (ValueError, TypeError, RuntimeError, OverflowError):
            raise TrainingCheckpointError(
                f"{TENSORS} holds 'rng.{rank}.{name[:40]}' as {_kind(state)} that is no state of a generator"
            ) from None


def check_same_layout(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], what: str
) -> None:
    """Check that tensors have exactly the names, shapes and dtypes expected. what: what they are the state of."""
    missing, unknown = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    for words, names in (("lacks", missing), ("does not fit the model: it has", unknown)):
        if names:
            raise TrainingCheckpointError(f"the state of the {what} {words} {shorten(names, 2)}")
    for name, (shape, dtype) in expected.items():
        if (tuple(tensors[name].shape), tensors[name].dtype) != (shape, dtype):
            allowed = _kind(torch.empty(shape, dtype=dtype, device="meta"))
            raise TrainingCheckpointError(
                f"the state of the {what} holds {quote(name)} as {_kind(tensors[name])}; allowed: {allowed}"
            )


def check_ranges(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check the values of an optimizer's and of recipes' state: no NaN where a run has none, no negative square, no
    scale that is not a positive number. Raises TrainingCheckpointError."""
    for name, value in tensors.items():
        allowed = _violated(name.partition("@")[0].rpartition(".")[2], value.detach())
        if allowed is not None:
            raise TrainingCheckpointError(f"{quote(name)} has values out of range; allowed: {allowed}")


def _violated(key: str, value: torch.Tensor) -> str | None:
    """Return what is allowed for an entry of state where its values are something else."""
    if value.numel() == 0:
        return None
    if value.dtype is torch.float8_e4m3fn:
        return _violated_fp8(key, value)
    low, high = (float(bound) for bound in torch.aminmax(value))
    finite = abs(low) < float("inf") and abs(high) < float("inf")  # False for NaN
    if key.endswith("_scale_inv") or key == "fp8_scale":
        return None if finite and low > 0 else "finite numbers above zero"
    if key in ("exp_avg", "master", "momentum_buffer", "ema", "grad_norm_average", "y", "z"):
        return None if finite else "finite numbers"
    if key in ("exp_avg_sq", "schedule_free"):
        return None if low >= 0 else "numbers of zero and more"
    if key in ("fp8_amax", "fp8_grad_amax", "fp8_history"):  # amaxes of a step that overflowed are infinite or NaN
        return "zero and positive numbers" if bool((value < 0).any()) else None
    if key == "fp8_rng_state":  # [seed and stream, counter]
        return None if int(value[1]) >= 0 and -(2**62) <= int(value[0]) < 2**62 else "a stream and a counter"
    return None


def _violated_fp8(key: str, value: torch.Tensor) -> str | None:
    """The same for E4M3, whose codes 0x7F and 0xFF are NaN: as int8 the one is the largest number, and with all signs
    turned the other is. Eight codes at a time where there are as many: five times as fast."""
    codes = value.contiguous().view(-1).view(torch.int8)
    wide = codes.numel() % 8 == codes.storage_offset() % 8 == 0
    for part in codes.split(1 << 20):
        low, high = (int(bound) for bound in torch.aminmax(part))
        if key == "exp_avg_sq" and (low < 0 or high == 127):  # its root is stored, never a negative number
            return "numbers of zero and more"
        as_signed = (part.view(torch.int64) ^ _SIGNS).view(torch.int8) if wide else part ^ -128
        if high == 127 or int(as_signed.max()) == 127:
            return "finite numbers"
    return None


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
