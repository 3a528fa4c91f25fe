"""Tell transformers' Auto classes about our folders, and peft about our layers."""

from typing import TYPE_CHECKING

from ..extras import require
from .config import TEConfig
from .model import TEModelForCausalLM

if TYPE_CHECKING:
    import transformers
    from transformers.models.auto import modeling_auto
else:
    transformers = require("transformers", "hf", feature="te_models.hf")
    modeling_auto = require("transformers.models.auto.modeling_auto", "hf", feature="te_models.hf")


def register() -> None:
    """Register configuration and model; a second call changes nothing."""
    transformers.AutoConfig.register(TEConfig.model_type, TEConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(TEConfig, TEModelForCausalLM, exist_ok=True)
    setattr(transformers, TEModelForCausalLM.__name__, TEModelForCausalLM)  # where `transformers serve` looks for it
    # By this list of names Trainer tells whether label smoothing has to shift the labels by one token.
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TEConfig.model_type] = TEModelForCausalLM.__name__
    if transformers.utils.is_peft_available():  # pyright: ignore[reportPrivateImportUsage]
        from . import lora  # which registers its adapters

        lora.register_with_peft()
