"""What users name by mistake for a model folder: one sentence says what it is, and which command makes a model folder
of it."""

import json
from pathlib import Path

from .errors import CheckpointError

ADAPTER = "adapter_config.json"
_CONFIG = "config.json"
_TRAINING = "training.json"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / ADAPTER).is_file() and not (folder / _CONFIG).exists()


def check_model_folder(folder: Path, named: str | None = None) -> None:
    """Raise CheckpointError for a path that is no folder, or one without a model. named: as the user called it."""
    if (folder / _CONFIG).exists() or (folder / _CONFIG).is_symlink():
        return
    named = str(folder) if named is None else named
    allowed = "allowed: a folder that has one, or a hub id as org/name"
    raise CheckpointError(
        instead_of_model(folder, named) or f"{named} is no model folder: it has no {_CONFIG}; {allowed}"
    )


def instead_of_model(folder: Path, named: str) -> str | None:
    """Return what there is in place of a model folder, in a sentence with what leads to one; None: a folder of no known
    kind."""
    if not folder.is_dir():
        return _of_file(folder, named) if folder.is_file() else f"{named} is not a folder"
    if is_adapter(folder):
        leads = f"te-models merge {base_of_adapter(folder)} {named} OUT adds it to its model's weights"
        return f"{named} is an adapter, and has no model; {leads}"
    if (folder / _TRAINING).is_file():
        return f"{named} is a training checkpoint; te-models export {named} OUT writes its model to OUT"
    if (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir():
        return _of_run(folder, named)
    if (folder / "meta.json").is_file() and (folder / "tokens.bin").is_file():
        return f"{named} is a token data set, and has no model"
    return None


def base_of_adapter(folder: Path) -> str:
    """Return the model that an adapter names, or DIR where it names none."""
    try:
        base = json.loads((folder / ADAPTER).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return "DIR"
    return base if isinstance(base, str) and base.isprintable() and 0 < len(base) < 200 else "DIR"


def _of_file(file: Path, named: str) -> str:
    with file.open("rb") as opened:
        begins = opened.read(4)
    if begins == b"GGUF" or file.suffix == ".gguf":
        return f"{named} is a GGUF file and not a folder; te-models import {named} DIR makes a model folder of it"
    if file.suffix == ".safetensors":
        return f"{named} is a weight file and not a folder; allowed: the folder that it and its {_CONFIG} are in"
    return f"{named} is not a folder; allowed: a model folder, or a hub id as org/name"


def _of_run(folder: Path, named: str) -> str:
    run = f"{named} is the folder of a training run"
    if (folder / "final" / _CONFIG).is_file():
        return f"{run}; its model is {Path(named) / 'final'}"
    steps = sorted(path.name for path in (folder / "checkpoints").glob("step-*") if (path / _TRAINING).is_file())
    if not steps:
        return f"{run}, which has written no checkpoint yet"
    newest = Path(named) / "checkpoints" / steps[-1]
    return f"{run}; te-models export {newest} OUT writes the model of its newest checkpoint to OUT"
