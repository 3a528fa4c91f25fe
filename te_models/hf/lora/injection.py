"""Tell peft about our layers: where it looks for what to adapt in a model, it asks here first.

peft takes adapters for other layers by configuration (`LoraConfig._register_custom_module`); this module does so for
every configuration, at the one place that each way of tuning passes (`BaseTuner.inject_adapter`), and there refuses
what would be wrong. Models without our layers pass unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from te_models.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear

from ...extras import require
from .adapter import LoraAdapter
from .dense import LoraLayerNormLinear, LoraLinear
from .grouped import LoraGroupedLinear
from .mlp import LoraLayerNormMLP
from .support import check_bias, check_config, check_layer, check_model, check_tokens, refuse_tuner
from .targets import name_layers, own_layers, targeted

if TYPE_CHECKING:
    import peft
    from peft import LoraModel
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


def register() -> None:
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
    check_tokens(config, model)
    plain = isinstance(tuner, peft.LoraModel) and config.peft_type == peft.PeftType.LORA
    if not plain:
        wanted = layers if config.peft_type == peft.PeftType.XLORA else targeted(tuner, config, model)
        for name, layer in wanted:
            refuse_tuner(config, name, layer)
        return
    name_layers(config, model)
    wanted = targeted(tuner, config, model)
    if not wanted:
        return
    check_config(config)
    check_model(model)
    for name, layer in wanted:
        check_layer(layer, name)
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
