"""From the configuration's number formats to the recipe that the layers run under, and the dtype in which CPUs
multiply: one for all ranks, and the same after a resume."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, get_args

import torch

from te_models.kernels.gemm import using_cpu_gemm
from te_models.kernels.gemm.cpu import CpuGemm, automatic_choice
from te_models.layers import PerModuleRecipe, Recipe, first_last_layers_bf16, recipe

from ..config import ConfigError, check
from ..sizes import plural
from .checkpoints.checkpoint import TrainingState
from .config import PrecisionConfig, TrainConfig
from .ranks.data_parallel import Ranks, gather_tensors

_AS_JSON = {"True": "true", "False": "false", "None": "null"}  # as recipes are written in Python


def build_recipe(precision: PrecisionConfig, num_layers: int) -> Recipe | None:
    """Return the recipe that `precision` describes for a model of `num_layers` layers; None: high precision.

    Raises ConfigError naming the field.
    """
    if precision.recipe == "none":
        return None
    options: dict[str, Any] = {}
    for text in precision.recipe_options:
        name, _, value = text.partition("=")
        try:
            options[name] = json.loads(_AS_JSON.get(value, value))
        except json.JSONDecodeError:
            options[name] = value
    try:
        chosen = Recipe.from_dict({"recipe": precision.recipe} | options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"precision.recipe_options: {error}") from None
    rules = [_rule(text) for text in precision.overrides]
    first, last = precision.first_layers_bf16, precision.last_layers_bf16
    check(
        first + last <= num_layers,
        "precision.first_layers_bf16 + last_layers_bf16",
        first + last,
        f"at most the {plural(num_layers, 'layer')}",
    )
    if first or last:
        rules += first_last_layers_bf16(chosen, num_layers, first=first, last=last).rules
    try:
        return PerModuleRecipe(default=chosen, rules=tuple(rules)) if rules else chosen
    except ValueError as error:
        raise ConfigError(f"precision.overrides: {error}") from None


def _rule(text: str) -> tuple[str, Any]:
    pattern, _, name = text.rpartition("=")
    try:
        return pattern, "bf16" if name == "bf16" else recipe(name)
    except (TypeError, ValueError):
        raise ConfigError(
            f"precision.overrides has {text!r}; allowed after the last '=': 'bf16' or the name of a recipe"
        ) from None


@contextlib.contextmanager
def cpu_gemm_of_run(
    config: TrainConfig, start: TrainingState | None, ranks: Ranks, device: str
) -> Iterator[TrainConfig]:
    """Set the CPU GEMM of a run and yield its configuration with it, which its checkpoints record.

    "auto" is what the checkpoint has, so that the continued run equals the uninterrupted one, or else what the first
    rank chooses for its machine. On another device nothing is set.
    """
    recorded = (
        "auto" if start is None else start.config["precision"].get("cpu_gemm", "auto")
    )  # absent in earlier releases
    start = None  # the block lasts as long as the run, which has no use for the tensors
    if device != "cpu":
        yield config
        return
    backend = config.precision.cpu_gemm
    backends = get_args(CpuGemm)
    if backend == "auto" and recorded in backends:
        backend = recorded
    if backend == "auto":
        mine = torch.tensor([backends.index(automatic_choice()[0] if ranks.is_main else backends[0])], device="cpu")
        backend = backends[int(gather_tensors({"cpu_gemm": mine}, ranks)["0.cpu_gemm"])]
    with using_cpu_gemm(backend):
        yield config.replace(precision=config.precision.replace(cpu_gemm=backend))
