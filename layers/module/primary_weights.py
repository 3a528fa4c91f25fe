"""Parameters of layers: made, initialised, and stored quantized where `quantized_model_init` asks for it."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..quantizer import Quantizer
from ..quantizer.tensor_types import type_of
from ..recipe.base import Recipe
from ..recipe.context import state
from ..recipe.per_module import PerModuleRecipe
from ..tensor.fsdp import sharded
from ..tensor.high_precision_init import preserve
from ..tensor.quantized_tensor import QuantizedTensor
from .autocast import quantized_model_init
from .base import QuantizedModule
from .model_state import quantized_modules
from .recipe_state import real_default_device

F = TypeVar("F", bound=Callable[[Any], None])


def default_init_method(weight: Tensor) -> Tensor:
    """Fill with N(0, 0.023^2)."""
    return weight if weight.is_meta else nn.init.normal_(weight, mean=0.0, std=0.023)


def empty_parameter(*shape: int, params_dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialised parameter; `params_dtype` None is torch's default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=params_dtype or torch.get_default_dtype(), device=device))


def materialising(reset: F) -> F:
    """Let `reset_parameters` of a layer on the meta device, called again after construction, make its parameters on
    torch's default device first, and store those quantized that were to be. Parameters that FSDP2 shards stay where
    they are: `to_empty` places those."""

    @functools.wraps(reset)
    def call(module: nn.Module) -> None:
        stored = _materialise(module) if vars(module).get("_was_reset") else {}
        reset(module)
        _store_again(module, stored)
        vars(module)["_was_reset"] = True

    return cast(F, call)


def _materialise(module: nn.Module) -> dict[str, Quantizer]:
    """Replace parameters on the meta device by uninitialised ones in high precision; return what quantizes them."""
    stored: dict[str, Quantizer] = {}
    device = real_default_device()
    for name, old in module.named_parameters(recurse=False):
        if not old.is_meta or sharded([old]):
            continue
        new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), old.requires_grad)
        attributes = vars(old)
        if isinstance(old, QuantizedTensor):
            stored[name], attributes = old.quantizer, old.user_attributes()
        vars(new).update(attributes)
        setattr(module, name, new)
        if isinstance(module, QuantizedModule):
            module.place_state(device)
    return stored


@torch.no_grad()
def _store_again(module: nn.Module, stored: dict[str, Quantizer]) -> None:
    """Quantize initialised parameters."""
    for name, quantizer in stored.items():
        weight = getattr(module, name)
        parameter = _quantized(weight, quantizer)
        if vars(module).get("_preserves_init_val"):
            preserve(module, name, parameter, weight.detach())
        setattr(module, name, parameter)


@torch.no_grad()
def store_weights_as_asked(module: QuantizedModule, stored: dict[int, nn.Parameter] | None = None) -> None:
    """Replace a layer's initialised weights by what `quantized_model_init` asks for. Layers call it when built.

    stored: what became of the weights of other layers, by the `id` of the weight, so that a shared one stays shared.
    What users have set on a weight, a parallel attribute or `requires_grad`, stays, too. Raises ValueError under a
    PerModuleRecipe where the layer has no name to look up, and for a shared weight whose layers want two formats.
    """
    recipe = state().storage
    if recipe is None:
        return
    if isinstance(recipe, PerModuleRecipe) and not module.name:
        raise ValueError(
            f"{type(recipe).__name__} chooses by name, and this {type(module).__name__} has none: pass name=..., or "
            "quantize the built model with store_weights(model, recipe)"
        )
    its_recipe = recipe.for_module(module.name)
    if its_recipe is None:
        return
    if module.weight_is_joined:
        raise ValueError(
            f"{module.name or type(module).__name__} has parameters_split, and its parameters cannot be stored "
            "quantized; allowed: parameters_split=None, or high-precision weights"
        )
    quantizer = its_recipe.quantizers(module.kind, module.name).weight
    vars(module)["_preserves_init_val"] = state().preserve_init_val
    stored = {} if stored is None else stored
    for name in module.weight_names():
        weight = getattr(module, name)
        parameter = stored.get(id(weight))
        if parameter is None:
            parameter = _quantized(weight, quantizer)
            if state().preserve_init_val:
                preserve(module, name, parameter, weight.detach())
            stored[id(weight)] = parameter
        elif isinstance(parameter, QuantizedTensor) and parameter.quantizer != quantizer:
            raise ValueError(
                f"{name} of {module.name or type(module).__name__} is shared with a layer that stores it as "
                f"{parameter.quantizer}, and is to be {quantizer} here; layers that share a weight need one format"
            )
        setattr(module, name, parameter)


def _quantized(weight: Tensor, quantizer: Quantizer) -> nn.Parameter:
    if weight.dim() == 3:
        values = quantizer.quantize_grouped(weight)
    elif weight.is_meta:  # what operations without values find out, in milliseconds for each
        values = type_of(quantizer).empty(weight.shape, quantizer, weight.dtype, weight.device)
    else:
        values = quantizer.quantize(weight)
    return nn.Parameter(values.keep_attributes(weight), weight.requires_grad)


def store_weights(model: nn.Module, recipe: Recipe, *, preserve_high_precision_init_val: bool = False) -> None:
    """Store the weights of a model's layers in the weight format of `recipe`, in place.

    For a recipe that chooses by name (PerModuleRecipe, a CustomRecipe that looks at names) call `name_modules(model)`
    before; a GPTModel has its names. Optimizers made before hold the old parameters.
    """
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve_high_precision_init_val):
        stored: dict[int, nn.Parameter] = {}  # a shared weight lives, and keeps its id, until its last layer is done
        for _, module in quantized_modules(model):
            store_weights_as_asked(module, stored)
    recipe.check_names(lambda: [module.name for _, module in quantized_modules(model) if module.name])
