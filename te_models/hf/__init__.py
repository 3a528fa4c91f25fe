"""Our models inside transformers: `TEModelForCausalLM`, for `generate`, `Trainer`, `pipeline` and the Auto classes.

Importing this package registers it: then `AutoConfig`, `AutoModelForCausalLM` and `pipeline` take folders of ours, and
peft, where it is installed, adapts our layers (`lora`).
May import: transformers (extra `hf`) and in `lora` peft; nothing else in te_models imports this
package when it is imported itself.
"""

from .cache import TransformersCache
from .callbacks import ExpertBiasCallback, RecipeStateCallback
from .config import TEConfig
from .model import TEModelForCausalLM
from .registration import register

__all__ = [
    "ExpertBiasCallback",
    "RecipeStateCallback",
    "TEConfig",
    "TEModelForCausalLM",
    "TransformersCache",
    "register",
]

register()
