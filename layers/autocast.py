"""The recipe in force: `autocast` for what layers compute, `quantized_model_init` for what they store.

The state is one plain module-level object, not a ContextVar: the compiler traces its attributes, guards on the recipe's
fields (an equal recipe re-created for the next step costs nothing) and follows regions opened inside a compiled
function. Both context managers nest and restore what was before.
"""

from __future__ import annotations

from typing import Self

from .recipe import Float8CurrentScaling, Recipe


class _State:
    """What the innermost regions say. None: high precision."""

    def __init__(self) -> None:
        self.compute: Recipe | None = None
        self.storage: Recipe | None = None


_STATE = _State()


def current_recipe() -> Recipe | None:
    """Return the recipe layers run under now, or None."""
    return _STATE.compute


def storage_recipe() -> Recipe | None:
    """Return the recipe whose weight format new layers store their weights in, or None."""
    return _STATE.storage


def _checked(enabled: bool, recipe: Recipe | None) -> Recipe | None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {recipe!r}; allowed: a Recipe such as MXFP8BlockScaling(), or None")
    if not enabled:
        return None
    return Float8CurrentScaling() if recipe is None else recipe


class autocast:
    """Run the layers inside under `recipe` (None: Float8CurrentScaling). `enabled=False` restores high precision.

    The backward pass of a forward run inside uses the same recipe wherever it is called.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None) -> None:
        self._recipe = _checked(enabled, recipe)

    def __enter__(self) -> Self:
        self._previous = _STATE.compute
        _STATE.compute = self._recipe
        return self

    def __exit__(self, *exc_info: object) -> None:
        _STATE.compute = self._previous


class quantized_model_init:
    """Store the weights of layers built inside in the weight format of `recipe` (None: Float8CurrentScaling)."""

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None) -> None:
        self._recipe = _checked(enabled, recipe)

    def __enter__(self) -> Self:
        self._previous = _STATE.storage
        _STATE.storage = self._recipe
        return self

    def __exit__(self, *exc_info: object) -> None:
        _STATE.storage = self._previous
