"""Assignments to a recipe that exists: programs of Transformer Engine make a recipe and then say what is in it.

    r = NVFP4BlockScaling()
    r.fp4_quant_fwd_inp = QParams()
    r.fp4_quant_bwd_grad = QParams(stochastic_rounding=True)

A recipe is a value: what is in force, and what graphs are guarded on, never changes. So each assignment makes another
value, `AssignedRecipe.value`, which a region takes when it is entered, and the object shows that value's fields. An
object that is in force itself takes no assignment. What several `QParams` say together has to be what one recipe can
mean; until it is, nothing may ask the object for quantizers.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from te_models.suggestions import did_you_mean, shown

from ..recipe.base import Recipe
from ..recipe.context import state

_USES = ("quantizers", "weight_quantizer", "for_module", "to_dict", "replace")
"""What a recipe whose parts contradict each other refuses."""


class AssignedRecipe(NamedTuple):
    """What was assigned to one object. value: the recipe that it means now; pending: QParams that no recipe can have
    together yet, by name; why: the sentence of what contradicts what."""

    value: Recipe
    pending: Mapping[str, Any] = {}
    why: str = ""

    def __call__(self) -> Recipe:
        """Return what the object means now, a value that no assignment changes. ValueError where its parts contradict
        each other."""
        if self.pending:
            raise ValueError(self.why)
        return self.value


def assign(recipe: Any, name: str, value: Any) -> None:
    """Do what `recipe.name = value` means, the `__setattr__` of recipes. ValueError for a name that is no part of the
    recipe, for a value that it cannot have, and inside of a region of the recipe."""
    if _is_in_force(recipe):
        raise ValueError(
            f"{name} is assigned to a {type(recipe).__name__} that is in force; allowed: before the region is entered"
        )
    before: AssignedRecipe = recipe.stands_for or AssignedRecipe(dataclasses.replace(recipe))
    pending, why = before.pending, before.why
    if name in recipe.QPARAMS:
        if not isinstance(value, type(getattr(before.value, name))):
            raise ValueError(f"{name} is {shown(value)}; allowed: a QParams")
        pending = {**pending, name: value}
        changes, why = recipe.fields_of({each: getattr(before.value, each) for each in recipe.QPARAMS} | pending)
        pending = pending if why else {}
    else:
        settable = [f.name for f in dataclasses.fields(recipe)] + _at_default(recipe)
        if name not in settable:
            allowed = ", ".join(sorted({*settable, *recipe.QPARAMS}))
            raise ValueError(
                f"{type(recipe).__name__} has no field {shown(name)} to assign to; its fields are: {allowed}"
                f"{did_you_mean(name, settable)}"
            )
        changes = {name: value}
    now = AssignedRecipe(dataclasses.replace(before.value, **changes), pending, why)
    for use in _USES:
        vars(recipe).pop(use, None)
        if pending:
            object.__setattr__(recipe, use, functools.partial(_refuse, why))
    for field, held in vars(now.value).items():
        object.__setattr__(recipe, field, held)
    object.__setattr__(recipe, "stands_for", now)


def _is_in_force(recipe: Recipe) -> bool:
    """Whether the very object is in force in a region of this thread, or will be again when one is left."""
    s = state()
    return any(
        held is recipe
        for held in (s.compute, s.storage, *(value for entry in s.entered for value in entry.before.values()))
    )


def _at_default(recipe: Recipe) -> list[str]:
    """Return the arguments of a recipe that are not fields: Transformer Engine's, accepted at their defaults only."""
    declared = {f.name for f in dataclasses.fields(recipe)}
    arguments = inspect.signature(type(recipe).__init__).parameters
    return [name for name in arguments if name != "self" and name not in declared]


def _refuse(why: str, *_: Any, **__: Any) -> NoReturn:
    raise ValueError(why)
