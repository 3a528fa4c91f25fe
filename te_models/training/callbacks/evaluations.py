"""Evaluations of a run beside its validation loss: any function of the model, and tasks of lm-evaluation-harness."""

from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from ...config import ConfigError
from ...extras import require
from ...model import GPTModel
from ..config import TrainConfig
from .callback import Callbacks, RunView
from .installed import load_installed

Evaluation = Callable[[GPTModel], float | torch.Tensor | Mapping[str, float | torch.Tensor]]
"""Of a model in eval mode, without gradients: a number, a tensor of one number, or these by name."""


class Evaluations:
    """What `evaluation.functions` and `evaluation.tasks` of a run measure, by name.

    Raises ConfigError for names that are not installed, tasks that do not exist, have no tokenizer, or are measured on
    several ranks, and MissingExtraError without lm_eval."""

    def __init__(self, config: TrainConfig, functions: Mapping[str, Evaluation], ranks: int) -> None:
        asked = config.evaluation
        self._functions: dict[str, Evaluation] = {}
        for name, path in asked.named_functions().items():
            self._functions[name] = load_installed(path, "evaluation.functions")
        self._functions |= functions
        for name, function in self._functions.items():
            if not callable(function):
                raise ConfigError(f"the evaluation {name!r} is a {type(function).__name__}; allowed: a function")
        if not asked.tasks:
            return
        require("lm_eval", "eval", feature="evaluation.tasks")
        if ranks > 1:
            raise ConfigError(f"evaluation.tasks is {list(asked.tasks)} with {ranks} ranks; allowed: one rank")
        tokenizer = config.data.tokenizer if config.data.tokenizer not in (None, "bytes") else config.model.path
        if tokenizer is None:
            raise ConfigError(
                "evaluation.tasks is set without a tokenizer; allowed: with data.tokenizer or model.path, a folder "
                "with a tokenizer.json"
            )
        self._functions["tasks"] = _Tasks(config, Path(tokenizer))

    def __bool__(self) -> bool:
        return bool(self._functions)

    def run(self, run: RunView, callbacks: Callbacks) -> dict[str, float]:
        """Return the numbers of all evaluations: under the name of each, or NAME/NUMBER where it has several. What one
        raises is an error of `callbacks`, as a result that is no number."""
        found: dict[str, float] = {}
        for name, function in self._functions.items():
            numbers = callbacks.guarded(
                f"the evaluation {name} failed", run, lambda n=name, f=function: _numbers(n, f, run.model)
            )
            found |= numbers or {}
        return found


def _numbers(name: str, function: Evaluation, model: GPTModel) -> dict[str, float]:
    with torch.no_grad():
        numbers = function(model)
    if not isinstance(numbers, Mapping):
        numbers = {"": numbers}
    found = {}
    for key, value in numbers.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"it returned a {type(value).__name__}; allowed: a number, or numbers by name")
        found[f"{name}/{key}" if key else name] = float(value)
    return found


class _Tasks:
    """Tasks of lm-evaluation-harness over the model that is trained."""

    def __init__(self, config: TrainConfig, tokenizer: Path) -> None:
        from ...evaluation.harness import check_tasks

        self._asked, self._tokenizer = config.evaluation, tokenizer
        folder = None if self._asked.task_folder is None else Path(self._asked.task_folder)
        keys = "evaluation.tasks", "evaluation.task_folder"
        try:
            self._manager = check_tasks(self._asked.tasks, folder, keys)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __call__(self, model: GPTModel) -> dict[str, float]:
        from ...evaluation.harness import run_tasks_of

        asked = self._asked
        found: dict[str, Any] = run_tasks_of(
            model, self._tokenizer, asked.tasks, limit=asked.task_limit, manager=self._manager
        )
        return {f"{task}/{name}": value for task, numbers in found.items() for name, value in numbers.items()}
