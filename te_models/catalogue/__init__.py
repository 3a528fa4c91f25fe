"""The catalogue: published models by name, with their configurations and what was published about them.

`data/` holds a JSON file for each vendor, facts alone; `entries.py` reads them, `listing.py` says what a model takes,
`toy.py` writes small ones like it.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .entries import CatalogueError, Entry, entry, names, near_names
    from .listing import Listed, listed, matching
    from .toy import random_toy, toy_config

__all__ = [
    "CatalogueError",
    "Entry",
    "Listed",
    "entry",
    "listed",
    "matching",
    "names",
    "near_names",
    "random_toy",
    "toy_config",
]

_HOME = {
    "entries": ("CatalogueError", "Entry", "entry", "names", "near_names"),
    "listing": ("Listed", "listed", "matching"),
    "toy": ("random_toy", "toy_config"),
}
__getattr__, __dir__ = lazy_names(__name__, {name: module for module, names in _HOME.items() for name in names})
