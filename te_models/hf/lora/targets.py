"""Which of our layers a configuration of peft means: by `target_modules`, "all-linear" and `target_parameters`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from te_models.layers import GroupedLinear, LayerNormLinear, Linear

from .support import LAYERS, check_parameter

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTuner

ALL_LINEAR = "all-linear"
_BASE = ".base_layer"


def own_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield our layers of a model, under the names that they had without adapters."""
    copies = _names_of_copies(model)
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and not name.startswith(copies):
            yield f".{name}".replace(_BASE, "")[1:], module


def _names_of_copies(model: nn.Module) -> tuple[str, ...]:
    """Return how the names begin of what `modules_to_save` trains whole: adapters are for the rest."""
    return tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "modules_to_save"))


def targeted(tuner: BaseTuner, config: Any, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return our layers that `config` means by name."""
    wanted = getattr(config, "target_modules", None)
    layers = list(own_layers(model))
    if not wanted:
        return []
    if _is_all_linear(wanted):
        return layers
    return [(name, layer) for name, layer in layers if tuner._check_target_module_exists(config, name)]


def _is_all_linear(target_modules: Any) -> bool:
    return isinstance(target_modules, str) and target_modules.lower() == ALL_LINEAR


def name_layers(config: LoraConfig, model: nn.Module) -> None:
    """Write the names of our layers into `config` where it means them by "all-linear", or by the weight as one of
    `target_parameters`. Raises ValueError for a parameter that is not all of the weight of its layer."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    layers = dict(own_layers(model))
    if layers and _is_all_linear(config.target_modules):
        found: Any = _maybe_include_all_linear_layers(config, model)  # typed as the config's base
        config.target_modules = set(found.target_modules) | set(layers)
    kept: list[str] = []
    by_weight: list[str] = []
    for key in config.target_parameters or ():
        found = [(name, each, p) for name, each, p in _parameters(model) if _means(key, f"{name}.{p}")]
        own = [(name, parameter) for name, _, parameter in found if name in layers]
        for name, parameter in own:
            whole = isinstance(layers[name], (Linear, LayerNormLinear, GroupedLinear)) and parameter == "weight"
            if not whole:
                raise ValueError(
                    f"target_parameters has {key!r}, which is not the whole weight of a {type(layers[name]).__name__}; "
                    f"allowed: {name.rpartition('.')[2]!r} in target_modules"
                )
        by_weight += [name for name, _ in own]
        kept += [f"{name}.{parameter}" for name, _, parameter in found if name not in layers] if own else [key]
        for name, module, parameter in found:
            check_parameter(f"{name}.{parameter}", module, model)
    if by_weight:
        config.target_parameters = kept or None
        config.target_modules = _with_names(config.target_modules, by_weight)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, parameter) of all parameters, with the name that the module had without adapters."""
    for name, module in model.named_modules():
        yield from ((f".{name}".replace(_BASE, "")[1:], module, parameter) for parameter in module._parameters)


def _means(key: str, name: str) -> bool:
    return name == key or name.endswith(f".{key}")


def _with_names(target_modules: Any, names: list[str]) -> Any:
    if isinstance(target_modules, str):
        return "|".join((f"(?:{target_modules})", *(re.escape(name) for name in names)))
    return set(target_modules or ()) | set(names)
