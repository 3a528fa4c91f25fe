"""Text generation: `generate` and `stream`, what they sample with, compiled and speculative decoding.

decoding     the arguments, and the loop over tokens            sampling     from logits to a token
text         from tokens to text, with stop strings
compiled     one graph for all tokens, with a static cache      speculative  a draft proposes, the model checks
mtp_draft    layers of multi-token prediction as a draft

May import: the model and what it is compiled with.
"""

from .decoding import generate, positions_of, stream
from .mtp_draft import MTPDraft
from .sampling import Sampler, filter_logits
from .speculative import Draft, DraftModel
from .text import TextStream

__all__ = [
    "Draft",
    "DraftModel",
    "MTPDraft",
    "Sampler",
    "TextStream",
    "filter_logits",
    "generate",
    "positions_of",
    "stream",
]
