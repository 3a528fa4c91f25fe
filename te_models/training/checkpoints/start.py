"""Where a run starts: at the newest checkpoint or at nothing, on every rank alike, and only if it is the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.manifest import MANIFEST
from te_models.layers import load_recipe_state

from ...config import ConfigError
from ...parallel.dims import ParallelDims
from ..config import (
    DataConfig,
    DiLoCoConfig,
    LoRAConfig,
    ModelSource,
    OptimizerConfig,
    PosttrainingConfig,
    PrecisionConfig,
    TrainConfig,
)
from ..config.precision import RecipePhase
from ..data.errors import DataError
from ..metrics import METRICS
from ..ranks.agreement import check_agreement
from ..ranks.data_parallel import Ranks, gather_tensors
from ..seeding import restore_random_state
from .checkpoint import TrainingState, load_state
from .checks import VALUES, TrainingCheckpointError, check_random_state
from .files import latest_checkpoint, list_checkpoints
from .recipes import LayerState, saved_recipe_state

if TYPE_CHECKING:
    from ...model import GPTModel
    from ..data.dataset import TokenDataset
    from ..run_data import RunData


def open_start(config: TrainConfig, output_dir: Path, ranks: Ranks) -> tuple[Path | None, TrainingState | None]:
    """Find the checkpoint to continue from and read it; None where there is nothing yet. Called by all ranks.

    Raises ConfigError and TrainingCheckpointError, on every rank where one of them raises, before anything is built.
    """
    checkpoint: Path | None = None
    start: TrainingState | None = None
    problem: ValueError | None = None
    try:
        checkpoint = find_start(config, output_dir)
        if checkpoint is not None:
            with naming_the_intact(checkpoint, output_dir):
                start = load_state(checkpoint, share=(ranks.rank, ranks.world_size))
    except (ConfigError, TrainingCheckpointError) as error:
        problem = error
    check_same_start(start, ranks, checkpoint=checkpoint, problem=problem)
    return checkpoint, start


@contextlib.contextmanager
def naming_the_intact(checkpoint: Path | None, output_dir: Path) -> Iterator[None]:
    """Where the block finds that a checkpoint cannot be used, add to the error which one can, and how."""
    try:
        yield
    except (TrainingCheckpointError, CheckpointError) as error:
        if checkpoint is None:
            raise
        what = str(error)
        if str(checkpoint) not in what:
            what = f"{checkpoint} cannot be used as a training checkpoint: {what}"
        raise TrainingCheckpointError(f"{what}; {_advice(checkpoint, output_dir)}") from None


def _advice(damaged: Path, output_dir: Path) -> str:
    """Say how to go on without a checkpoint: from the newest other one of the run that is intact."""
    for other in reversed(list_checkpoints(output_dir)):
        if other.resolve() == damaged.resolve():
            continue
        with contextlib.suppress(TrainingCheckpointError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_state(other)
            option = f"--resume-from {shlex.quote(str(other))}"
            return f"the newest intact one is {other.name}: continue from it with {option} (in the file: resume_from)"
    return "no other checkpoint of this run is intact: start anew with another output_dir"


def find_start(config: TrainConfig, output_dir: Path) -> Path | None:
    """Return the checkpoint to continue from: the one that was asked for, or the newest. Raises ConfigError where that
    is no folder, or `resume` is off and the directory is used."""
    if config.resume_from is not None:
        if not Path(config.resume_from).is_dir():
            there = ", ".join(folder.name for folder in list_checkpoints(output_dir)[-3:]) or "none"
            raise ConfigError(
                f"resume_from is {config.resume_from!r}, which is not a folder; allowed: a checkpoint, such as those "
                f"in {output_dir / 'checkpoints'} ({there})"
            )
        _check_is_checkpoint(Path(config.resume_from))
        return Path(config.resume_from)
    if config.resume:
        return latest_checkpoint(output_dir)
    if (output_dir / METRICS).exists() or (output_dir / "checkpoints").exists():
        raise ConfigError(f"{output_dir} holds another run and resume is off; choose another output_dir")
    return None


def _check_is_checkpoint(folder: Path) -> None:
    """Raise ConfigError for the folder of a run, or of a model: neither is a damaged checkpoint."""
    run = folder.parent if folder.name == "checkpoints" else folder
    if (newest := latest_checkpoint(run)) is not None:
        raise ConfigError(
            f"resume_from is {str(folder)!r}, the folder of a run; allowed: one of its checkpoints, of which {newest} "
            "is the newest"
        )
    if (folder / "config.json").is_file() and not (folder / VALUES).exists():
        raise ConfigError(
            f"resume_from is {str(folder)!r}, the folder of a model, without the optimizer's state; allowed: a "
            "checkpoint, or model.path for a run that begins with this model"
        )


_FREE = {
    "model.activation_checkpointing",
    "model.recompute_modules",
    "model.recompute_save_ops",
    "model.activation_offloading",
    "model.loss_chunk_tokens",
    "data.tokenizer_workers",
    "data.prefetch",
    "model.verify",
    "optimizer.skip_nonfinite",
    "precision.cpu_gemm",
}
"""What is changed to get a run going again: less memory, past a step that it always stops at, on another machine."""
_ACCUMULATION = "data.gradient_accumulation"
_LATER = ("optimizer.moe_router_bias_update_rate", "optimizer.accumulate_allreduce_grads_in_fp32")
"""Absent from checkpoints of before there were these: such a run goes on, balanced from there on if it is a mixture
with an expert bias, and with gradients that are added up in float32."""


def check_same_run(config: TrainConfig, start: TrainingState, ranks: Ranks) -> None:
    """Refuse to continue a run whose numbers would silently change: name the fields that changed.

    Fields that decide only how long, how fast, in how much memory or how visibly it runs may change, and so may the
    layout and the number of ranks, with as much less or more accumulation: the same windows are a step. ranks: the
    ranks that read different data.
    """
    now, before = _fields(config.to_dict()), _fields(start.config)
    per_step = int(now.pop(_ACCUMULATION)) * ranks.world_size
    accumulated = int(before.pop(_ACCUMULATION, 1))
    for name in _LATER:
        before.setdefault(name, now[name])
    before = {key: value for key, value in _defaults().items() if key != _ACCUMULATION} | before
    changed = [name for name in now | before if now.get(name) != before.get(name) and name not in _FREE]
    changed = [name for name in changed if not name.startswith("schedule.")]  # `continued_config` compares curves
    changed = [name for name in changed if name != "precision.schedule"]
    check_same_recipes(config, start)
    if config.schedule.extend == "replace" or changed == ["optimizer.lr"]:
        changed = [name for name in changed if name != "optimizer.lr"]
    if changed:
        raise ConfigError(f"cannot continue from step {start.step}: {', '.join(changed)} differ from the checkpoint's")
    share = (start.config.get("parallel") or {}).get("context_parallel_size", 1)
    before_ranks = start.data_ranks or start.world_size // share
    if per_step != accumulated * before_ranks:
        raise ConfigError(
            f"cannot continue from step {start.step}: a step had {accumulated * before_ranks} micro-batches, "
            f"{_ACCUMULATION} {accumulated} on each of {before_ranks} ranks, and has {per_step} on "
            f"{ranks.world_size}; allowed: a gradient_accumulation with the same product, or data.global_batch_size"
        )


def check_same_recipes(config: TrainConfig, start: TrainingState) -> None:
    """Raise ConfigError where a finished step ran under another phase of `precision.schedule` than it would now. What
    comes after the checkpoint may change."""

    def phases(schedule: tuple[RecipePhase, ...], steps: int) -> list[tuple[int, RecipePhase]]:
        begins = [(phase.begin(steps), phase.replace(from_step=2, from_share=None)) for phase in schedule]
        return [(begin, phase) for begin, phase in begins if begin < start.step]

    saved = start.config["precision"].get("schedule", [])  # absent in earlier releases
    before = phases(tuple(map(RecipePhase.from_dict, saved)), start.config["steps"])
    now = phases(config.precision.schedule, config.steps)
    if before != now:
        told = [", ".join(f"{phase.in_words()} from step {begin + 1}" for begin, phase in its) for its in (before, now)]
        raise ConfigError(
            f"cannot continue from step {start.step}: precision.schedule differs from the checkpoint's in finished "
            f"steps, which had {told[0] or 'one recipe'} and would have {told[1] or 'one recipe'}"
        )


def set_newer_aside(checkpoint: Path, step: int, output_dir: Path) -> list[Path]:
    """Rename the checkpoints of `output_dir` that the run leaves behind where it continues from an older one, or from
    one elsewhere: they are of another course of the run, and the next start would take the newest. Returns their new
    names, ending in ".set-aside"; nothing is removed."""
    renamed = []
    for folder in list_checkpoints(output_dir):
        if int(folder.name.removeprefix("step-")) >= step and folder.resolve() != checkpoint.resolve():
            aside, number = folder.with_name(f"{folder.name}.set-aside"), 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{folder.name}.set-aside-{number}")
            renamed.append(folder.rename(aside))
    return renamed


def restore_generators(
    start: TrainingState, ranks: Ranks, model: GPTModel, dims: ParallelDims, live: Mapping[str, LayerState]
) -> None:
    """Restore this rank's random states and its recipes' live state. A rank that the checkpoint does not know keeps its
    own random states.

    dims: the layout of the ranks. live: the recipe state that the model will have (`complete_recipe_state`). Raises
    TrainingCheckpointError where that of the checkpoint is another.
    """
    known = ranks.rank < start.world_size
    state = saved_recipe_state(start, ranks.rank, dims, live)
    if start.parts is not None:
        from .sharded.checkpoint import read_private

        random = read_private(start.parts, "rng", ranks.rank) if known else {}
    else:
        own = f"rng.{ranks.rank}."
        random = {k.removeprefix(own): t for k, t in start.tensors.items() if k.startswith(own)}
    if known:
        check_random_state(random, str(ranks.rank))
        restore_random_state(random)
    load_recipe_state(model, state)


def _fields(config: dict[str, Any]) -> dict[str, str]:
    """Return what decides a run's numbers, by name (`optimizer.lr`), as texts."""
    found = {}
    for name in ("seed", "model", "data", "optimizer", "diloco", "lora", "posttraining", "schedule", "precision"):
        value = config.get(name)
        table = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: json.dumps(v) for key, v in table.items()}
    return found


def _defaults() -> dict[str, str]:
    """Return the defaults of keys, by name: what a checkpoint of before there was a key means."""
    parts = {"model": ModelSource, "data": DataConfig, "optimizer": OptimizerConfig, "lora": LoRAConfig}
    parts |= {"diloco": DiLoCoConfig, "precision": PrecisionConfig, "posttraining": PosttrainingConfig}
    found = {}
    for table, part in parts.items():
        for field in dataclasses.fields(part):
            if field.default is not dataclasses.MISSING:
                value = list(field.default) if isinstance(field.default, tuple) else field.default
                found[f"{table}.{field.name}"] = json.dumps(value)
    return found


def check_same_start(
    start: TrainingState | None,
    ranks: Ranks,
    *,
    checkpoint: Path | None = None,
    problem: ValueError | None = None,
) -> None:
    """Raise, on every rank, where ranks found different checkpoints: they would train different models from there on,
    and average their gradients. Different are other steps, and other contents (`checkpoint` is where they are).

    problem: what keeps this rank from starting; it raises that, and the others TrainingCheckpointError.
    """
    digest = 0
    if start is not None and checkpoint is not None:
        file = next(file for file in (checkpoint / MANIFEST, checkpoint / VALUES) if file.exists())
        digest = int.from_bytes(hashlib.sha256(file.read_bytes()).digest()[:7], "little")
    values = [0 if start is None else start.step, digest, problem is not None]
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    found = gather_tensors({"start": mine}, ranks)
    if problem is not None:
        raise problem
    rows = [found[f"{rank}.start"].tolist() for rank in range(ranks.world_size)]
    for rank, (step, digest, failed) in enumerate(rows):
        if failed:
            raise TrainingCheckpointError(f"rank {rank} has no checkpoint that it can continue from; it says why")
        if step != rows[0][0]:
            raise TrainingCheckpointError(
                f"rank 0 continues from step {rows[0][0]} and rank {rank} from step {step}; output_dir must be a "
                "folder that all ranks see"
            )
        if digest != rows[0][1]:
            raise TrainingCheckpointError(
                f"rank 0 and rank {rank} see different checkpoints of step {step}; output_dir must be a folder that "
                "all ranks see"
            )


def check_same_data(dataset: TokenDataset | RunData, start: TrainingState | None, ranks: Ranks) -> str:
    """Return the digest of the data set. Raises DataError, on every rank, where a rank reads other tokens than rank 0
    or the run has trained on others until now."""
    digest = dataset.checked_digest()
    read = {"tokens": f"{len(dataset):,}", "digest": digest}
    check_agreement({f"{name} of data.path {dataset.path}": value for name, value in read.items()}, ranks, DataError)
    if start is not None and start.data_digest not in (None, digest):
        raise DataError(
            f"cannot continue from step {start.step}: {dataset.path} holds other tokens than the steps before read "
            f"(digest {digest[:12]}, was {start.data_digest[:12]}); allowed: the same data set"
        )
    return digest
