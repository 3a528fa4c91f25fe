"""Text generation: `generate` and `stream`, what they sample with, compiled and speculative decoding.

decoding     the arguments, and the loop over tokens            sampling     from logits to a token
compiled     one graph for all tokens, with a static cache      speculative  a draft proposes, the model checks

May import: the model and what it is compiled with.
"""

from .decoding import generate, positions_of, stream
from .sampling import Sampler, filter_logits
from .speculative import Draft, DraftModel

__all__ = ["Draft", "DraftModel", "Sampler", "filter_logits", "generate", "positions_of", "stream"]
