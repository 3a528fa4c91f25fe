"""The result of a run on the Hugging Face hub, with a model card that holds the run's facts.

Everything in the card is read from the run's folder: what it trained on, how, with which versions, and what it reached.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_models.checkpoints.io.atomic import replace_text

from ...config import ConfigError
from ...extras import require
from ...sizes import plural
from ..log.starts import read_starts
from ..metrics import METRICS, read_metrics
from .callback import Callback, RunView

if TYPE_CHECKING:
    from ..loop import TrainResult

CARD = "README.md"


def model_card(output_dir: str | Path, folder: str = "final") -> str:
    """Return the card of a run as Markdown with a YAML head: its data, steps, recipe, losses, configuration and
    versions, and the sizes of the model.

    output_dir: the folder of a run; folder: the model folder in it. Raises ConfigError where the run has no starts, or
    the folder no config.json.
    """
    run = Path(output_dir)
    starts, rows = read_starts(run), read_metrics(run / METRICS)
    config_file = run / folder / "config.json"
    if not starts or not config_file.is_file():
        raise ConfigError(
            f"{run} has no {folder}/config.json or no starts.jsonl; allowed: the folder of a finished run"
        )
    config, environment = starts[-1]["config"], starts[-1]["environment"]
    data, precision, model = config["data"], config["precision"], config["model"]
    last: dict[str, Any] = rows[-1] if rows else {}
    measured = next((row for row in reversed(rows) if "validation_loss" in row), {})
    base = model.get("path")
    head = ["---", "library_name: te_models", *([f"base_model: {json.dumps(base)}"] if _is_hub_id(base) else []), "---"]
    facts = {
        "model": base or model.get("name") or "random weights",
        "method": _method(config),
        "data": _data(data),
        "steps": f"{last.get('step', 0)} of {config['steps']}",
        "tokens": f"{last['tokens']:,}" if "tokens" in last else None,
        "windows": f"{plural(data['sequence_length'], 'token')}, {data['micro_batch_size']} x "
        f"{data['gradient_accumulation']} a step on each of {plural(environment.get('ranks', 1), 'rank')}",
        "precision": _precision(precision),
        "optimizer": f"{config['optimizer']['kind']}, lr {config['optimizer']['lr']}, {config['schedule']['kind']}",
        "loss": _number(last.get("loss")),
        "validation loss": _number(measured.get("validation_loss")),
        "seed": config["seed"],
        "versions": ", ".join(f"{n} {environment[n]}" for n in ("te_models", "torch", "python") if n in environment),
        "device": environment.get("device"),
    }
    lines = [*head, "", f"# {run.name}", "", "Trained with te_models.", "", "| fact | value |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items() if value is not None]
    further = measured.get("evaluations") or next((r["evaluations"] for r in reversed(rows) if "evaluations" in r), {})
    if further:
        lines += ["", "## Evaluations", "", "| evaluation | value |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_number(value)} |" for name, value in further.items()]
    lines += ["", "## Configuration", "", "```json", json.dumps(config, indent=2, sort_keys=True), "```", ""]
    return "\n".join(lines)


def push_to_hub(
    output_dir: str | Path,
    repo_id: str,
    *,
    folder: str = "final",
    private: bool = True,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Upload the model of a run with its card, and return the address of the commit.

    folder: which model folder of the run, as "adapter-hf" of a run of adapters. private: whether a repository that is
    made is private. revision: the branch, made where it does not exist (None: the main one). token, endpoint:
    as for `huggingface_hub.HfApi`; it finds a token that `hf auth login` left. The card is written to the folder as
    README.md. Raises ConfigError for a folder that is no run's, and huggingface_hub's errors.
    """
    hub = require("huggingface_hub", "hf", feature="push_to_hub")
    card = model_card(output_dir, folder)
    target = Path(output_dir) / folder
    replace_text(target / CARD, card)
    api = hub.HfApi(endpoint=endpoint, token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    done = api.upload_folder(
        repo_id=repo_id, folder_path=str(target), revision=revision, commit_message="Upload a te_models run"
    )
    return str(done.commit_url)


class PushToHub(Callback):
    """Uploads the result of a run when it is complete: `hub.repo_id` of a configuration makes one.

    Example:
        train(config, callbacks=[PushToHub("me/model")])
    """

    def __init__(self, repo_id: str, **options: Any) -> None:
        """options: of `push_to_hub`. Raises ConfigError for what is no name of a repository."""
        utils, errors = (require(f"huggingface_hub.{x}", "hf", feature="hub.repo_id") for x in ("utils", "errors"))
        try:
            utils.validate_repo_id(repo_id)
        except errors.HFValidationError:
            raise ConfigError(
                f"hub.repo_id is {repo_id!r}; allowed: organisation/name, of letters, digits, '-', '_' and '.'"
            ) from None
        self.repo_id, self.options = repo_id, options

    def on_begin(self, run: RunView) -> None:
        """Raise ConfigError, on rank 0, where there is no token: before a run, and not behind it."""
        hub = require("huggingface_hub", "hf", feature="hub.repo_id")
        if run.rank == 0 and self.options.get("token") is None and hub.get_token() is None:
            raise ConfigError(
                f"hub.repo_id is {self.repo_id}, without a token; allowed: after `hf auth login`, or with HF_TOKEN"
            )

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """Upload, from rank 0."""
        if run.rank == 0:
            push_to_hub(run.output_dir, self.repo_id, folder=result.model_dir.name, **self.options)


def _method(config: dict[str, Any]) -> str:
    method = (config.get("posttraining") or {}).get("method", "none")
    rank = config["lora"]["rank"]
    trained = f"LoRA of rank {rank}" if rank else "all weights"
    if method == "distill":
        method += f" from {config['posttraining']['teacher']}"
    return trained if method == "none" else f"{method}, {trained}"


def _data(data: dict[str, Any]) -> str:
    """Name the text or the data sets, with the steps from which a blend has other weights."""
    names = ", ".join(map(str, data.get("text") or data.get("blend") or [data.get("path")]))
    return "".join([names, *(f"; from step {stage}" for stage in data.get("blend_steps", ()))])


def _precision(precision: dict[str, Any]) -> str:
    """Say the recipe of each part of a run, and what weights are rounded to or stored as."""
    said = [precision["dtype"], f"recipe {precision['recipe']}"]
    for phase in precision.get("schedule", ()):
        share = phase["from_share"]
        begin = f"step {phase['from_step']}" if share is None else f"{share:.0%} of the run"
        said.append(f"{phase['recipe']}{' (forward)' * (phase['passes'] == 'forward')} from {begin} on")
    if precision.get("qat", "none") != "none":
        said.append(f"weights{' and inputs' * precision['qat_activations']} rounded to {precision['qat']}")
    if precision.get("quantized_weights"):
        said.append("weights stored quantized")
    return ", ".join(said)


def _is_hub_id(base: Any) -> bool:
    if not isinstance(base, str) or base.count("/") != 1 or base.startswith((".", "/", "~")):
        return False
    return not Path(base).exists()


def _number(value: Any) -> str | None:
    return f"{value:.4f}" if isinstance(value, (int, float)) else None


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
