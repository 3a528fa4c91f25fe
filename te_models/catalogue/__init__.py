"""The catalogue: published models by name, with their configurations and what was published about them.

`data/` holds a JSON file for each vendor, facts alone; `entries.py` reads them, `listing.py` says what a model takes,
`toy.py` writes small ones like it.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .entries import CatalogueEntry, CatalogueError, entry, names, near_names
    from .listing import Listed, matching, model_listing
    from .toy import random_toy, toy_config

__all__ = [
    "CatalogueEntry",
    "CatalogueError",
    "Listed",
    "entry",
    "matching",
    "model_listing",
    "names",
    "near_names",
    "random_toy",
    "toy_config",
]

__getattr__, __dir__ = lazy_names(__name__)
