"""Tell peft about our layers: where it looks for what to adapt in a model, it asks here first.

peft takes adapters for other layers by configuration (`LoraConfig._register_custom_module`); this module does so for
every configuration, at the one place that each way of tuning passes (`BaseTuner.inject_adapter`), and there refuses
what would be wrong. A configuration means our layers by `target_modules`, "all-linear" and `target_parameters`. Models
without our layers pass unchanged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from te_models.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear

from ...extras import require
from ...lora.layers import LAYERS, check_experts_are_local, check_layer, check_undivided
from .adapter import LoraAdapter
from .layers import LoraGroupedLinear, LoraLayerNormLinear, LoraLayerNormMLP, LoraLinear
from .support import (
    check_bias,
    check_config,
    check_parameter,
    check_trained_tokens,
    refuse_tuner,
)

if TYPE_CHECKING:
    import peft
    from peft import LoraConfig, LoraModel
    from peft.tuners import tuners_utils
    from peft.tuners.tuners_utils import BaseTuner
else:
    peft = require("peft", "peft", feature="te_models.hf.lora")
    tuners_utils = require("peft.tuners.tuners_utils", "peft")

ADAPTERS: dict[type[nn.Module], type[LoraAdapter]] = {
    Linear: LoraLinear,
    LayerNormLinear: LoraLayerNormLinear,
    LayerNormMLP: LoraLayerNormMLP,
    GroupedLinear: LoraGroupedLinear,
}
_ASKS = "_asks_te_models"


def register_with_peft() -> None:
    """Have peft ask here; a second call changes nothing."""
    _wrap(tuners_utils.BaseTuner, "inject_adapter", _before_injection)
    _wrap(peft.LoraModel, "add_weighted_adapter", _before_weighting)


def _wrap(owner: type, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _ASKS):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        before(self, *args, **options)
        return original(self, *args, **options)

    setattr(method, _ASKS, True)
    setattr(owner, name, method)


def _before_injection(tuner: BaseTuner, model: nn.Module, adapter_name: str, *_: Any, **__: Any) -> None:
    """Complete the configuration of an adapter that is about to be made. Raises ValueError for what cannot be."""
    config: Any = tuner.peft_config[adapter_name]
    layers = list(own_layers(model))
    if not layers:
        return
    check_trained_tokens(config, model)
    is_lora = isinstance(tuner, peft.LoraModel) and config.peft_type == peft.PeftType.LORA
    if not is_lora:
        wanted = layers if config.peft_type == peft.PeftType.XLORA else targeted_modules(tuner, config, model)
        for name, layer in wanted:
            refuse_tuner(config, name, layer)
        return
    name_layers(config, model)
    wanted = targeted_modules(tuner, config, model)
    if not wanted:
        return
    check_config(config)
    check_experts_are_local(model)
    for name, layer in wanted:
        check_layer(layer, name)
        check_undivided(layer, name)
        check_bias(config, name, layer)
    config._register_custom_module(ADAPTERS)


def _before_weighting(tuner: LoraModel, adapters: list[str], *_: Any, **__: Any) -> None:
    """Raise ValueError where a weighted sum of adapters would leave out or mix up factors, or have another scaling."""
    found = {name: module for name, module in tuner.model.named_modules() if isinstance(module, LoraAdapter)}
    for name, module in found.items():
        if isinstance(module, (LoraGroupedLinear, LoraLayerNormMLP)):
            raise ValueError(
                f"add_weighted_adapter knows one pair of factors of each layer, and {name} has several; allowed: "
                "several active adapters, which are summed, or merging one after the other"
            )
    scaled = [adapter for adapter in adapters if getattr(tuner.peft_config.get(adapter), "use_rslora", False)]
    if found and scaled:
        raise ValueError(
            f"the adapter {scaled[0]!r} has use_rslora, and add_weighted_adapter scales its sum in the other way; "
            "allowed: several active adapters, which are summed, or merging one after the other"
        )


ALL_LINEAR = "all-linear"
_BASE = ".base_layer"


def own_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield our layers of a model, under the names that they had without adapters."""
    copies = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "modules_to_save"))
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and not name.startswith(copies):
            yield f".{name}".replace(_BASE, "")[1:], module


def targeted_modules(tuner: BaseTuner, config: Any, model: nn.Module) -> list[tuple[str, nn.Module]]:
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
        names: Any = set(found.target_modules) | set(layers)  # as LoraConfig itself holds them, against its annotation
        config.target_modules = names
    for_peft: list[str] = []
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
        for_peft += [f"{name}.{parameter}" for name, _, parameter in found if name not in layers] if own else [key]
        for name, module, parameter in found:
            check_parameter(f"{name}.{parameter}", module, model)
    if by_weight:
        config.target_parameters = for_peft or None
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
