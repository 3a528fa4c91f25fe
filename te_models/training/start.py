"""Where a run starts: at the newest checkpoint or at nothing, on every rank alike, and only if it is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_models.layers import load_recipe_state

from ..config import ConfigError
from .checkpoint import TrainingCheckpointError, TrainingState, latest_checkpoint
from .config import TrainConfig
from .distributed import Ranks, gather_tensors
from .metrics import METRICS
from .seeding import restore_random_state


def find_start(config: TrainConfig, output_dir: Path) -> Path | None:
    """Return the checkpoint to continue from. Raises ConfigError where `resume` is off and the directory is used."""
    if config.resume:
        return latest_checkpoint(output_dir)
    if (output_dir / METRICS).exists() or (output_dir / "checkpoints").exists():
        raise ConfigError(f"{output_dir} holds another run and resume is off; choose another output_dir")
    return None


_FREE = {"model.activation_checkpointing", "model.loss_chunk_tokens", "optimizer.skip_nonfinite"}
"""What is changed to get a run going again: less memory, and past a step that it always stops at."""
_ACCUMULATION = "data.gradient_accumulation"
_RATE = "optimizer.moe_router_bias_update_rate"
"""Absent from checkpoints of before there was one: such a run goes on, balanced from there on if it is a mixture with
an expert bias."""


def check_same_run(config: TrainConfig, start: TrainingState, ranks: Ranks) -> None:
    """Refuse to continue a run whose numbers would silently be those of another: name the fields that changed.

    Fields that decide only how long, how fast, in how much memory or how visibly it runs may change, and so may the
    number of ranks, with as much less or more accumulation: the same windows are a step.
    """
    now, before = _fields(config.to_dict()), _fields(start.config)
    per_step = int(now.pop(_ACCUMULATION)) * ranks.world_size
    accumulated = int(before.pop(_ACCUMULATION, 1))
    before.setdefault(_RATE, now[_RATE])
    changed = [name for name in now | before if now.get(name) != before.get(name) and name not in _FREE]
    size = start.config.get("expert_model_parallel_size", 1)  # checkpoints of before had all experts on every rank
    changed += ["expert_model_parallel_size"] if config.expert_model_parallel_size != size else []
    if changed:
        raise ConfigError(f"cannot continue from step {start.step}: {', '.join(changed)} differ from the checkpoint's")
    if per_step != accumulated * start.world_size:
        raise ConfigError(
            f"cannot continue from step {start.step}: a step had {accumulated * start.world_size} micro-batches, "
            f"{_ACCUMULATION} {accumulated} on each of {start.world_size} ranks, and has {per_step} on "
            f"{ranks.world_size}; allowed: a gradient_accumulation with the same product"
        )


def restore_generators(start: TrainingState, ranks: Ranks, model: nn.Module) -> None:
    """Restore this rank's random states and its recipes' live state. A rank that the checkpoint does not know keeps its
    own random states; scales are the same on all ranks that have the same layers."""
    own, known = f"rng.{ranks.rank}.", ranks.rank < start.world_size
    if known:
        restore_random_state({k.removeprefix(own): t for k, t in start.tensors.items() if k.startswith(own)})
    own = f"recipe.{ranks.rank % start.world_size}."
    state = {k.removeprefix(own): t for k, t in start.tensors.items() if k.startswith(own)}
    load_recipe_state(model, {k: t for k, t in state.items() if known or not k.endswith("fp8_rng_state")})


def _fields(config: dict[str, Any]) -> dict[str, str]:
    """Return what decides a run's numbers, by name (`optimizer.lr`), as texts."""
    found = {}
    for name in ("seed", "model", "data", "optimizer", "schedule", "precision"):
        value = config.get(name)
        table = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: json.dumps(v) for key, v in table.items()}
    return found


def check_same_start(start: TrainingState | None, ranks: Ranks) -> None:
    """Raise TrainingCheckpointError, on every rank, where ranks found different checkpoints: they would train different
    models from there on, and average their gradients."""
    found = gather_tensors({"step": torch.tensor([0 if start is None else start.step])}, ranks)
    steps = [int(found[f"{rank}.step"]) for rank in range(ranks.world_size)]
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise TrainingCheckpointError(
                f"rank 0 continues from step {steps[0]} and rank {rank} from step {step}; output_dir must be a folder "
                "that all ranks see"
            )
