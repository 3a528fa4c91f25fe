"""Tasks of lm-evaluation-harness (extra `eval`), through its own class for transformers' models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..extras import require


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
    harness = require("lm_eval", "eval", feature="eval --task")
    models = require("lm_eval.models.huggingface", "eval", feature="eval --task")
    task_manager = require("lm_eval.tasks", "eval").TaskManager
    path = None if task_folder is None else str(task_folder)
    manager = None if path is None else task_manager(include_path=path, include_defaults=False)
    if manager is None or not all(manager.match_tasks([task]) for task in tasks):
        manager = task_manager(include_path=path)  # reads the thousands of files of the harness's own, for seconds
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"--task {unknown[0]!r} is no task of lm-evaluation-harness or of --task-folder")
    transformers = require("transformers", "hf", feature="eval --task")
    from ..hf import TEModelForCausalLM

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model: Any = TEModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if adapter is not None:
        from ..lora import load_adapter

        load_adapter(model.gpt, adapter)
    model = model.to(device).eval()
    wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=device)
    found = harness.simple_evaluate(
        model=wrapped, tasks=list(tasks), task_manager=manager, num_fewshot=num_fewshot, limit=limit, bootstrap_iters=0
    )
    return {
        task: {
            name: value
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for task, numbers in found["results"].items()
    }
