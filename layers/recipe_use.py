"""What recipes a layer ran under, and what a recipe that goes by names means for it.

A name must not get into a compiled graph: it would be guarded on, and a block that layers share would be compiled once
for each of them. So where a region is entered outside of compiled code, every layer looks up what it has to do then;
graphs are guarded on that, which is the same for many layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .recipe import GemmQuantizers, Recipe

if TYPE_CHECKING:
    from .quantized_module import QuantizedModule

Choice = tuple[Recipe | None, GemmQuantizers | None]
"""The recipe of one layer and its quantizers; (None, None): high precision."""


class RecipeUse:
    """What recipes a module ran under: the names of its last forward pass, for `recipe_report` (the one asked for and
    the one that ran), whether the exit of the region shall update its scales, see `leave_region`, and what the recipe
    that was last brought into force means for it, None if it has to look that up.

    An object of its own because every call writes it, and setting an attribute of a module costs a microsecond.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # None: there was no forward pass yet
        self.ran: str | None = None
        # since the outermost autocast region began, under delayed scaling: amaxes noted in training; in a calibration,
        # or of the weights that training will use
        self.recorded = self.calibrated = False
        self.chosen: Choice | None = None
        self.chosen_for: Recipe | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recipe in force out of copies: it may hold a function that cannot be pickled."""
        return vars(self) | {"chosen": None, "chosen_for": None}


def choose(recipe: Recipe, module: QuantizedModule) -> Choice:
    """Return what a recipe that goes by names means for a layer."""
    own = recipe.for_module(module.name)
    return own, None if own is None else own.quantizers(module.kind, module.name)


def choose_for_all(recipe: Recipe | None, modules: Callable[[], Iterable[QuantizedModule]]) -> bool:
    """Let layers look up what a recipe means for them, if it goes by names, and return whether they have."""
    if recipe is None or not recipe.by_name or torch.compiler.is_compiling():
        return False
    for module in modules():
        use = module.recipe_use
        if use.chosen_for is not recipe:
            use.chosen_for = recipe
            try:
                use.chosen = choose(recipe, module)
            except Exception:  # raised again where the layer runs, if it does: it may be another model's
                use.chosen = None
    return True
