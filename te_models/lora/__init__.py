"""LoRA and DoRA over every GEMM layer of a model, without peft: trained, merged, and written as peft reads them.

layers         a layer with an adapter in its place   model    adapters over a model, and merged into it
adapter        the adapter itself                     files    folders with the names of our layers
plain_weights  adapters of tables and routers         reading  folders that peft wrote for transformers' model
factors        adapters of weights that are divided   export   folders for transformers' model
peft_folders   the tensors of a folder of peft

May import: checkpoints, layers, the model.
"""

from .adapter import Adapter
from .export import export_adapter
from .files import load_adapter, save_adapter
from .model import add_lora, lora_state_dict, merge_lora

__all__ = ["Adapter", "add_lora", "export_adapter", "load_adapter", "lora_state_dict", "merge_lora", "save_adapter"]
