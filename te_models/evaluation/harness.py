"""Tasks of lm-evaluation-harness (extra `eval`), through its own class for transformers' models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require

if TYPE_CHECKING:
    from ..model import GPTModel


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    *,
    task_folder: Path | None = None,
    dtype: str = "bfloat16",
    device: str = "cpu",
    batch_size: int = 1,
    num_fewshot: int | None = None,
    limit: int | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Return the numbers of each task, by the names of lm-evaluation-harness ("acc,none").

    folder: a te_models or Hugging Face folder with its tokenizer. task_folder: a folder of YAML files with tasks of
    one's own, beside the harness's. limit: documents of each task; None: all. adapter: a folder of `save_adapter`, put
    over the model. Raises MissingExtraError, and ValueError
    for a task that does not exist.
    """
    from ..hf import TEModelForCausalLM

    manager = check_tasks(tasks, task_folder)
    model: Any = TEModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if adapter is not None:
        from ..lora import load_adapter

        load_adapter(model.gpt, adapter)
    model = model.to(device).eval()
    options: dict[str, Any] = {"batch_size": batch_size, "num_fewshot": num_fewshot, "limit": limit}
    return _run(model, folder, tasks, manager, **options)


def run_tasks_of(
    model: GPTModel,
    tokenizer: Path,
    tasks: Sequence[str],
    *,
    task_folder: Path | None = None,
    batch_size: int = 1,
    num_fewshot: int | None = None,
    limit: int | None = None,
    manager: Any = None,
) -> dict[str, Any]:
    """Return what `run_tasks` does, of a model in memory, in eval mode. tokenizer: a folder with its tokenizer.
    manager: what `check_tasks` returned; None: it is called here."""
    from ..hf import TEConfig, TEModelForCausalLM

    training = model.training
    wrapped = TEModelForCausalLM(TEConfig(config=model.config.to_dict()), gpt=model)
    wrapped.train(training)
    options: dict[str, Any] = {"batch_size": batch_size, "num_fewshot": num_fewshot, "limit": limit}
    manager = check_tasks(tasks, task_folder) if manager is None else manager
    return _run(wrapped, tokenizer, tasks, manager, **options)


def check_tasks(
    tasks: Sequence[str], task_folder: Path | None, keys: tuple[str, str] = ("--task", "--task-folder")
) -> Any:
    """Return the manager that knows the tasks. keys: what asks for tasks and for their folder. Raises ValueError for a
    task that does not exist."""
    require("lm_eval", "eval", feature="eval --task")
    task_manager = require("lm_eval.tasks", "eval", feature="eval --task").TaskManager
    path = None if task_folder is None else str(task_folder)
    manager = None if path is None else task_manager(include_path=path, include_defaults=False)
    if manager is None or not all(manager.match_tasks([task]) for task in tasks):
        manager = task_manager(include_path=path)  # reads the thousands of files of the harness's own, for seconds
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"{keys[0]} {unknown[0]!r} is no task of lm-evaluation-harness or of {keys[1]}")
    return manager


def _run(
    model: Any, folder: Path, tasks: Sequence[str], manager: Any, *, batch_size: int, **options: Any
) -> dict[str, Any]:
    harness = require("lm_eval", "eval", feature="eval --task")
    models = require("lm_eval.models.huggingface", "eval", feature="eval --task")
    transformers = require("transformers", "hf", feature="eval --task")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    device = str(next(model.parameters()).device)
    wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=device)
    found = harness.simple_evaluate(
        model=wrapped, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
    )
    return {
        task: {
            name: value
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for task, numbers in found["results"].items()
    }
