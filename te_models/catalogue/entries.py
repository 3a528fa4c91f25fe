"""Entries of the catalogue: the JSON files of `data/`, checked and read as values.

An entry is published facts alone: config.json's values as the hub spells them, of which those suffice that differ from
the defaults of transformers' class, the numbers as their source prints them, and the source.
"""

from __future__ import annotations

import difflib
import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_models.checkpoints.families import Family

    from ..config import ModelConfig

DATA = Path(__file__).parent / "data"
_UNITS = {"T": 1e12, "B": 1e9, "M": 1e6}


class CatalogueError(ValueError):
    """A name that is not in the catalogue."""


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A published model.

    Attributes:
        name: in the catalogue, in lower case.
        hub_id, revision: where its files are; revision is a commit, None where any will do.
        license: its id, as the hub writes it; None where no document says it.
        context: positions that its makers publish; None where they say none.
        parameters, active_parameters: as published, a whole number or digits with a unit ("8.03B"); the latter are used
            by one token. None where none are published.
        elsewhere: of `parameters` those that belong to no text model: what sees images, or predicts further tokens;
            negative: those that the published number leaves out, such as embeddings.
        format: in which the hub's files hold weights, where that is not bfloat16 or float16.
        source: which document says the numbers.
        assumed: fields of config.json that no document prints, so that the defaults of transformers' class stand.
        hf: the values of config.json.
    """

    name: str
    hub_id: str
    revision: str | None = None
    license: str | None = None
    context: int | None = None
    parameters: int | str
    active_parameters: int | str | None = None
    elsewhere: int = 0
    format: str | None = None
    source: str
    assumed: tuple[str, ...] = ()
    hf: dict[str, Any]

    @property
    def family(self) -> Family:
        """The family of the model's files."""
        from te_models.checkpoints.families import family_of

        return family_of(self.hf["model_type"])

    def read_config(self) -> ModelConfig:
        """Return the configuration of the model; each call reads it again."""
        return self.family.read_config(self.hf)

    def agrees(self, counted: int) -> bool:
        """Whether a number of parameters is the published one: the same, or the same in all digits that are printed."""
        return _agrees(self.parameters, counted + self.elsewhere)


def _agrees(published: int | str, counted: int) -> bool:
    if isinstance(published, int):
        return published == counted
    digits, unit = published[:-1], published[-1]
    return f"{counted / _UNITS[unit]:.{len(digits.partition('.')[2])}f}" == digits


@functools.cache
def _all() -> dict[str, CatalogueEntry]:
    found: dict[str, CatalogueEntry] = {}
    known = {field.name for field in fields(CatalogueEntry)} - {"name"}
    for file in sorted(DATA.glob("*.json")):
        for name, values in json.loads(file.read_text(encoding="utf-8")).items():
            values |= {"hf": values.pop("config"), "assumed": tuple(values.get("assumed", ()))}
            if strange := values.keys() - known:
                raise CatalogueError(f"{file.name}: {name} has {sorted(strange)}; allowed: {', '.join(sorted(known))}")
            if name in found:
                raise CatalogueError(f"{file.name}: {name} is in another file, too")
            found[name] = CatalogueEntry(name=name, **values)
    return found


def names() -> list[str]:
    """Return the names of all models, sorted."""
    return sorted(_all())


def near_names(word: str) -> str:
    """Return "; did you mean 'name'?" for the names nearest to a word, "" where none is near. Their dots are of
    versions, so that `did_you_mean`, to which they end a path, would think of others."""
    near = difflib.get_close_matches(word.lower(), _all(), n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def entry(name: str) -> CatalogueEntry:
    """Return the entry of a name; CatalogueError names the nearest ones where there is none. Letters of both cases are
    the same."""
    found = _all().get(name.lower())
    if found is None:
        near = near_names(name)
        raise CatalogueError(f"no model of the catalogue is called {name!r}{near}; te-models models lists them")
    return found
