"""What a model of the catalogue is and takes: the rows of `te-models models`, from counts alone."""

import fnmatch
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from te_models.checkpoints.tools.statistics import count_parameters

from ..certify.estimates import cache_bytes, memory, serving
from .entries import CatalogueEntry, CatalogueError, entry, names, near_names


@dataclass(frozen=True)
class Listed:
    """A model of the catalogue with what follows from its configuration.

    Attributes:
        parameters, active_parameters: of the text model, counted; published ones are the entry's.
        serve: format of the weights -> bytes.
        fine_tune: format of the weights -> bytes with LoRA adapters of rank 16 and what trains them.
        train: recipe -> bytes of weights, masters, moments and gradients.
        cache_bytes: of what decoding carries after 1,024 positions.
        formats: the forms in which files of the family are read and written, and the quantized one of the hub's.
    """

    entry: CatalogueEntry
    parameters: int
    active_parameters: int
    serve: dict[str, int]
    fine_tune: dict[str, int]
    train: dict[str, int]
    cache_bytes: int
    formats: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the entry's facts, without the values of config.json, and what was counted."""
        facts = asdict(self.entry)
        facts |= {f"published_{name}": facts.pop(name) for name in ("parameters", "active_parameters")}
        model_type = facts.pop("hf")["model_type"]
        counted = {name: getattr(self, name) for name in ("parameters", "active_parameters", "serve", "fine_tune")}
        more = {"train": self.train, "cache_bytes": self.cache_bytes, "formats": self.formats}
        return {"name": facts.pop("name"), "family": model_type, **facts, **counted, **more}


def model_listing(found: CatalogueEntry) -> Listed:
    """Return what a model takes; nothing of it is downloaded."""
    config = found.read_config()
    parameters, active = count_parameters(config)
    uses = memory(config, 2 * parameters)
    train = {use.removeprefix("training, "): size for use, size in uses.items() if use.startswith("training")}
    (adapters,) = (size - 2 * parameters for use, size in uses.items() if use.startswith("LoRA"))
    weights = serving(config)
    tuned = {name: size + adapters for name, size in weights.items()}
    forms = [*found.family.forms, *filter(None, [found.format])]
    return Listed(found, parameters, active, weights, tuned, train, cache_bytes(config), forms)


def matching(pattern: str | None) -> list[CatalogueEntry]:
    """Return the models whose name, hub id or family holds a word, or fits a pattern with * and ?; None: all.

    Raises CatalogueError where none does.
    """
    if pattern is None:
        return [entry(name) for name in names()]
    word = pattern.lower()
    fitting = word if any(mark in word for mark in "*?[") else f"*{word}*"
    found = []
    for one in map(entry, names()):
        words = (one.name, one.hub_id.lower(), one.hf["model_type"])
        if any(fnmatch.fnmatchcase(text, fitting) for text in words):
            found.append(one)
    if not found:
        folder = f"; te-models inspect {pattern} shows the folder" if Path(pattern).is_dir() else ""
        raise CatalogueError(f"no model of the catalogue fits {pattern!r}{folder or near_names(word)}")
    return found
