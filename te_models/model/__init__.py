"""The models: GPTModel and the parts it is made of, one idea per file.

gpt        the model: embedding, decoder, output; loading and saving     decoder   the stack of layers
layer      one transformer layer, in five block kinds                     attention self attention
mlp        dense MLP and shared experts                                   moe       router, experts, dispatchers
embedding  token and position embedding                                   output    logits, loss, ModelOutput
rotary     cos and sin tables                                             cache     key-value caches
build      how modules are created, and what is refused                    mtp       layers that predict further tokens
constants  buffers that are computed, not learned                        stage     pipeline stages of a model
logprobs   log-probabilities of given tokens                           one_token  sublayers of one token in eager code
hyper_connection  a residual stream of several lanes

May import: everything but the command line.
"""

from .build import Build
from .cache import KVCache, StaticKVCache
from .gpt import GPTModel
from .layer import DecoderLayer
from .logprobs import logprobs
from .moe import ExpertLoad, MoELayer, RouterOutput, RouterRecord, take_expert_load, update_expert_bias
from .output import ModelOutput
from .pretrained.refit import ModelRefit

__all__ = [
    "Build",
    "DecoderLayer",
    "ExpertLoad",
    "GPTModel",
    "KVCache",
    "MoELayer",
    "ModelOutput",
    "ModelRefit",
    "RouterOutput",
    "RouterRecord",
    "StaticKVCache",
    "logprobs",
    "take_expert_load",
    "update_expert_bias",
]
