"""LoRA with peft on our layers: adapters that see what the weight they adapt sees (arXiv 2106.09685).

Importing this package tells peft: then `peft.get_peft_model(model, LoraConfig(target_modules=...))` adapts Linear,
LayerNormLinear, LayerNormMLP and GroupedLinear as it adapts torch's own layers. `te_models.hf` imports it where peft
is installed. May import: peft, and the rest of te_models.
"""

from .adapter import LoraAdapter
from .injection import register_with_peft
from .layers import LoraGroupedLinear, LoraLayerNormLinear, LoraLayerNormMLP, LoraLinear

__all__ = [
    "LoraAdapter",
    "LoraGroupedLinear",
    "LoraLayerNormLinear",
    "LoraLayerNormMLP",
    "LoraLinear",
    "register_with_peft",
]

register_with_peft()
