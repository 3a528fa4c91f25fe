"""From the configuration's number formats to the recipe that the layers run under, and the dtype in which CPUs
multiply: one for all ranks, and the same after a resume.

Nothing of a schedule of recipes is state: the recipe of a step follows from its number, so a resumed run switches where
the uninterrupted one does. What a recipe carries from step to step, scales and random bits, stays in the layers while
another one is in force, and in every checkpoint from the first step on that has run under it.

Quantization-aware training: passes see weights rounded to a format, and the optimizer updates what was rounded. The
weights themselves are rounded in place before the micro-batches of a step and put back after them, so that a gradient
is that of the rounded weight and goes straight through to the weight (arXiv 1308.3432), compiled or not, and once for
all micro-batches. `te-models quantize`, and each export that takes its folder, round to the same numbers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.kernels.gemm import using_cpu_gemm
from te_models.kernels.gemm.cpu import CpuGemm, automatic_choice
from te_models.layers import (
    CustomRecipe,
    DelayedScaling,
    HybridQuantizer,
    PerModuleRecipe,
    Quantizer,
    Recipe,
    first_last_layers_bf16,
    recipe,
)
from te_models.layers.recipe.base import HIGH_PRECISION, GemmQuantizers, QuantizerRole
from te_models.layers.tensor.fsdp import local_part

from ..config import ConfigError, check
from ..model.parallel import free_gathered_parameters
from ..sizes import plural
from .checkpoints.checkpoint import TrainingState
from .config import PrecisionConfig, TrainConfig
from .config.precision import RecipeKeys
from .optimizer.whole_matrix import divided_matrices
from .ranks.data_parallel import Ranks, gather_tensors

if TYPE_CHECKING:
    from ..model import GPTModel
    from ..parallel.parts import ModelParts

_AS_JSON = {"True": "true", "False": "false", "None": "null"}  # as recipes are written in Python


def build_recipe(precision: RecipeKeys, num_layers: int, where: str = "precision") -> Recipe | None:
    """Return the recipe that `precision` describes for a model of `num_layers` layers; None: high precision.

    Raises ConfigError naming the field, of the table `where`.
    """
    if precision.recipe == "none":
        return None
    options: dict[str, Any] = {}
    for text in precision.recipe_options:
        name, _, value = text.partition("=")
        try:
            options[name] = json.loads(_AS_JSON.get(value, value))
        except json.JSONDecodeError:
            options[name] = value
    try:
        chosen = Recipe.from_dict({"recipe": precision.recipe} | options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}.recipe_options: {error}") from None
    rules = [_rule(text, where) for text in precision.overrides]
    first, last = precision.first_layers_bf16, precision.last_layers_bf16
    check(
        first + last <= num_layers,
        f"{where}.first_layers_bf16 + last_layers_bf16",
        first + last,
        f"at most the {plural(num_layers, 'layer')}",
    )
    if first or last:
        rules += first_last_layers_bf16(chosen, num_layers, first=first, last=last).rules
    try:
        return PerModuleRecipe(default=chosen, rules=tuple(rules)) if rules else chosen
    except ValueError as error:
        raise ConfigError(f"{where}.overrides: {error}") from None


def _rule(text: str, where: str) -> tuple[str, Any]:
    pattern, _, name = text.rpartition("=")
    try:
        return pattern, "bf16" if name == "bf16" else recipe(name)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}.overrides has {text!r}; allowed after the last '=': 'bf16' or the name of a recipe"
        ) from None


class RecipeSchedule:
    """The recipes of a run of `steps` steps, the first one in force.

    Attributes:
        now: The recipe in force; None: high precision.
        name: What the metrics call it.

    Raises ConfigError, naming the field, for a recipe that a model of `num_layers` layers cannot have.
    """

    def __init__(self, precision: PrecisionConfig, steps: int, num_layers: int) -> None:
        self._begins = [0, *(phase.begin(steps) for phase in precision.schedule)]
        self._names = [precision.recipe, *(phase.in_words() for phase in precision.schedule)]
        inputs = round_inputs(recipe(precision.qat)) if precision.qat_activations else None
        self._recipes = [build_recipe(precision, num_layers) or inputs]
        for phase in precision.schedule:
            found = build_recipe(phase, num_layers, "precision.schedule")
            if phase.passes == "forward":
                found = forward_only(found, self._recipes[-1])
            self._recipes.append(found)
        self._phase = 0

    @classmethod
    def first(cls, precision: PrecisionConfig, num_layers: int) -> RecipeSchedule:
        """Return the first recipe alone."""
        return cls(precision.replace(schedule=()), 1, num_layers)

    @property
    def now(self) -> Recipe | None:
        return self._recipes[self._phase]

    @property
    def name(self) -> str:
        return self._names[self._phase]

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self._recipes) > 1

    def enter(self, step: int) -> bool:
        """Put the recipe of the step that follows `step` finished ones in force; return whether that is another one."""
        before = self._phase
        self._phase = sum(begin <= step for begin in self._begins) - 1
        return self._phase != before

    def used(self, step: int) -> list[Recipe]:
        """Return the recipes that the first `step` steps run under, in order."""
        return [r for begin, r in zip(self._begins, self._recipes, strict=True) if begin < step and r is not None]


def round_inputs(of: Recipe) -> Recipe:
    """Return the recipe that rounds the inputs of layers as `of` does, and computes gradients from what that gave."""
    own = of.quantizers("", "").input.with_usage(rowwise=True, columnwise=False)

    def of_role(role: QuantizerRole) -> Quantizer:
        return own if role.tensor_type == "input" else HIGH_PRECISION.input

    return CustomRecipe(qfactory=of_role, backward_override="dequantized")


def forward_only(forward: Recipe | None, gradients: Recipe | None) -> Recipe | None:
    """Return the recipe whose forward GEMMs `forward` describes, and whose gradient GEMMs `gradients`.

    None: high precision. Raises ConfigError where one of the two has scales from a history (both passes share it), or
    computes its gradients from what the forward pass saved.
    """
    if forward is None and gradients is None:
        return None

    def of_role(role: QuantizerRole) -> Quantizer:
        ahead, back = _of_layer(forward, role), _of_layer(gradients, role)
        if role.tensor_type == "grad_output":
            return back.grad_output
        first, second = (ahead.input, back.input) if role.tensor_type == "input" else (ahead.weight, back.weight)
        return HybridQuantizer(
            rowwise_quantizer=first.member("rowwise"), columnwise_quantizer=second.member("columnwise")
        )

    _check_separable(forward)
    _check_separable(gradients)
    return CustomRecipe(qfactory=of_role)


def _of_layer(recipe: Recipe | None, role: QuantizerRole) -> GemmQuantizers:
    own = None if recipe is None else recipe.for_module(role.name)
    return HIGH_PRECISION if own is None else own.quantizers(role.module, role.name)


def _check_separable(recipe: Recipe | None) -> None:
    """Raise ConfigError for a recipe one pass of which cannot run under another one."""
    members: list[Recipe] = [] if recipe is None else [recipe]
    for member in members:
        default, rules = getattr(member, "default", None), getattr(member, "rules", ())
        members += [inner for inner in (default, *(choice for _, choice in rules)) if isinstance(inner, Recipe)]
        what = "takes its scales from a history of both passes" if isinstance(member, DelayedScaling) else ""
        what = "has a backward_override" if member.backward_override is not None else what
        if what:
            raise ConfigError(
                f"precision.schedule has passes = 'forward' beside the recipe {member.NAME!r}, which {what}; allowed: "
                "recipes without either, or passes = 'both'"
            )


def rounded_weight(weight: Tensor, quantizer: Quantizer) -> Tensor:
    """Return what a quantizer's rowwise copy of matrices [out, in] or [num_gemms, out, in] stands for, each with scales
    of its own."""
    if weight.dim() == 3:
        return torch.stack([rounded_weight(matrix, quantizer) for matrix in weight]) if len(weight) else weight.clone()
    rowwise = quantizer.with_usage(rowwise=True, columnwise=quantizer.symmetric)
    return rowwise.dequantize_fields(rowwise.quantize_fields(weight), weight.dtype, weight.shape)


class RoundedWeights:
    """The weights of a model's linear layers, to be rounded by `quantizer`. parts: what this rank has of the model,
    where ranks divide it; None: all of it. Ranks that have parts of a matrix enter and leave `in_force` together."""

    def __init__(self, model: GPTModel, quantizer: Quantizer, parts: ModelParts | None = None) -> None:
        self._model, self._quantizer = model, quantizer
        self._weights = {name: p for name, p in model.named_parameters() if is_linear_weight(name)}
        self._divided = {} if parts is None else divided_matrices(parts, frozen=True)

    def _rounded(self, name: str, own: Tensor) -> Tensor:
        """Return this rank's part of a weight, rounded as a whole."""
        whole = self._divided.get(name)
        values = rounded_weight(own if whole is None else whole.gather(own), self._quantizer)
        return values if whole is None else whole.own(values)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Have the weights be rounded ones inside."""
        before = {name: local_part(weight).detach().clone() for name, weight in self._weights.items()}
        try:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    local_part(weight).copy_(self._rounded(name, before[name]))
            yield
        finally:
            free_gathered_parameters(
                self._model
            )  # gathered weights that an evaluation left would be used by the next pass
            with torch.no_grad():
                for name, weight in self._weights.items():
                    local_part(weight).copy_(before[name])


@contextlib.contextmanager
def cpu_gemm_of_run(
    config: TrainConfig, start: TrainingState | None, ranks: Ranks, device: str
) -> Iterator[TrainConfig]:
    """Set the CPU GEMM of a run and yield its configuration with it, as its checkpoints record it.

    "auto" is what the checkpoint has, so that the continued run equals the uninterrupted one, or else what the first
    rank chooses for its machine. On another device nothing is set.
    """
    recorded = (
        "auto" if start is None else start.config["precision"].get("cpu_gemm", "auto")
    )  # absent in earlier releases
    start = None  # the block lasts as long as the run, and that has no use for the tensors
    if device != "cpu":
        yield config
        return
    backend = config.precision.cpu_gemm
    backends = get_args(CpuGemm)
    if backend == "auto" and recorded in backends:
        backend = recorded
    if backend == "auto":
        mine = torch.tensor([backends.index(automatic_choice()[0] if ranks.is_main else backends[0])], device="cpu")
        backend = backends[int(gather_tensors({"cpu_gemm": mine}, ranks)["0.cpu_gemm"])]
    with using_cpu_gemm(backend):
        yield config.replace(precision=config.precision.replace(cpu_gemm=backend))
