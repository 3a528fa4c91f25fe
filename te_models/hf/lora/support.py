"""What of peft our layers can honour. Everything else is a ValueError before the model is changed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from te_models.layers import LayerNormMLP

from ...model.embedding import EmbeddingTable
from ...model.moe import Router
from ...model.output import OutputLayer

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

_STARTS = (True, False, "gaussian")
_WITHOUT_MEANING = ("fan_in_fan_out", "layer_replication", "lora_bias", "megatron_config", "use_qalora")


def check_config(config: LoraConfig) -> None:
    """Raise ValueError for an option of a LoraConfig that asks for something else than plain LoRA."""
    if config.init_lora_weights not in _STARTS:
        allowed = ", ".join(map(repr, _STARTS))
        raise ValueError(
            f"init_lora_weights is {config.init_lora_weights!r}; allowed for layers of te_models: {allowed}"
        )
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for name in (*variants, *_WITHOUT_MEANING):
        value = getattr(config, name, None)
        if value:
            raise ValueError(f"{name} is {value!r}, which layers of te_models cannot honour; allowed: plain LoRA")


def check_bias(config: LoraConfig, name: str, layer: nn.Module) -> None:
    """Raise ValueError where "lora_only" would train no bias, for peft looks for `bias` alone."""
    if config.bias == "lora_only" and (isinstance(layer, LayerNormMLP) or "bias0" in layer._parameters):
        raise ValueError(
            f"bias is 'lora_only', and the biases of {name} are not one parameter `bias`; allowed: 'none', 'all'"
        )


def refuse_tuner(config: PeftConfig, name: str, layer: nn.Module) -> None:
    """Raise ValueError for a way of tuning that knows nothing of our layers."""
    kind: Any = config.peft_type
    raise ValueError(
        f"{getattr(kind, 'value', kind)} cannot adapt {name}, a {type(layer).__name__} of te_models; allowed: LoRA "
        "(peft.LoraConfig with get_peft_model)"
    )


def check_parameter(name: str, module: nn.Module, model: nn.Module) -> None:
    """Raise ValueError for a parameter of a router, of which its layer reads more than peft's wrapper has, and for the
    embedding that is the output layer's weight, too: peft would change one use of it, and both when it merges."""
    if isinstance(module, Router):
        raise ValueError(f"{name} belongs to a router; allowed: modules_to_save=['router'], which trains it whole")
    tied = any(isinstance(other, OutputLayer) and other.weight is None for other in model.modules())
    if isinstance(module, EmbeddingTable) and tied:
        raise ValueError(
            f"{name} is also the weight of the output layer; allowed: modules_to_save=['word_embeddings'], which "
            "trains it for both"
        )


def check_trained_tokens(config: PeftConfig, model: nn.Module) -> None:
    """Raise ValueError where single rows of our embedding are to be trained, which peft can do of torch's alone."""
    wanted = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None)
    if wanted and any(isinstance(module, EmbeddingTable) for module in model.modules()):
        raise ValueError(
            "tokens are to be trained one by one, and the embedding is not torch's; allowed: "
            "modules_to_save=['word_embeddings'], which trains it whole"
        )
