"""Stretches of a run, between two switches of its recipe: which recipe each layer has in one, in either pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from te_models.layers import Recipe
from te_models.layers.module.model_state import quantized_modules

from ..config import ModelConfig
from ..model import GPTModel
from ..training.config import TrainConfig
from ..training.precision import RecipeSchedule, build_recipe


@dataclass(frozen=True)
class StretchRecipes:
    """schedule: with the recipe that layers run under in force; forward, gradients: the recipes that it was made of,
    for the two passes; None: high precision."""

    schedule: RecipeSchedule
    forward: Recipe | None
    gradients: Recipe | None

    @classmethod
    def at(cls, config: TrainConfig, model: ModelConfig, stretch: int) -> StretchRecipes:
        """Return the recipes of a stretch of a run, counted from 0, of the whole model."""
        precision, layers = config.precision, model.num_layers
        schedule = RecipeSchedule(precision, config.steps, layers)
        forward = gradients = build_recipe(precision, layers)
        for phase in precision.schedule[:stretch]:
            forward = build_recipe(phase, layers, "precision.schedule")
            gradients = forward if phase.passes == "both" else gradients
        schedule.enter(begins(config)[stretch])
        return cls(schedule, forward, gradients)

    def of_module(self, name: str) -> tuple[Recipe | None, Recipe | None]:
        """Return the recipes of a layer, by its name in the whole model, in the forward pass and for the gradients."""
        forward, gradients = (None if its is None else its.for_module(name) for its in (self.forward, self.gradients))
        return forward, gradients


def begins(config: TrainConfig) -> list[int]:
    """Return how many steps of a run come before each of its stretches."""
    return [0, *(phase.begin(config.steps) for phase in config.precision.schedule)]


def named_as_in_the_whole(gpt: GPTModel, layers: Sequence[int]) -> None:
    """Have the layers of a model that has these of another one alone be called as they are there, for recipes that
    choose by name."""
    for name, module in quantized_modules(gpt.whole or gpt):
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(layers[int(words[2])])
        module.name = ".".join(words)
