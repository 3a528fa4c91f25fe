"""The models: GPTModel and the parts it is made of, one idea per file.

gpt        the model: embedding, decoder, output; loading and saving     decoder   the stack of layers
layer      one transformer layer, in five block kinds                     attention self attention
mlp        dense MLP and shared experts                                   moe       router and experts
embedding  token and position embedding                                   output    logits, loss, ModelOutput
rotary     cos and sin tables                                             cache     key-value cache
build      how modules are created                                        support   what is refused
constants  buffers that are computed, not learned

May import: everything but the command line.
"""

from .build import Build
from .cache import KVCache
from .gpt import GPTModel
from .layer import TransformerLayer
from .moe import MoELayer, RouterOutput
from .output import ModelOutput

__all__ = ["Build", "GPTModel", "KVCache", "MoELayer", "ModelOutput", "RouterOutput", "TransformerLayer"]
