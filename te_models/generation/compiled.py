"""Decoding in one graph: a step's tensors have the same shapes for every token, so nothing is compiled twice.

B batch, V vocabulary.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..compile.cache import backend_for
from ..compile.compile_model import with_room
from ..config import ModelConfig
from ..model import GPTModel
from ..model.cache.static import StaticKVCache, StaticStep

FEWEST = 64
"""Slots of the smallest cache."""


def static_length(tokens: int) -> int:
    """Return the slots for this many tokens: 64, 96, 128, 192, 256, 384 and so on, up to half as many again as there
    are tokens, so that each doubling of a text's length takes two graphs more, whatever lengths there are."""
    power = max(FEWEST, 1 << (tokens - 1).bit_length())
    middle = power // 4 * 3
    return middle if max(tokens, FEWEST) <= middle else power


def _decode(model: GPTModel, ids: Tensor, position_ids: Tensor, memory: StaticStep) -> tuple[Tensor, Tensor | None]:
    """ids, position_ids: [B, 1] -> the logits of the next token, [B, V], and what a `RouterRecord` takes of it."""
    output = model(ids, position_ids=position_ids, cache=memory)
    memory.position.add_(1)
    assert output.logits is not None
    return output.logits[:, -1], output.router_indices


Decode = Callable[[GPTModel, Tensor, Tensor, StaticStep], tuple[Tensor, Tensor | None]]


def decode_step(model: GPTModel, cache: StaticKVCache) -> Decode:
    """Return the compiled step of models with one configuration, in caches of one shape and dtype. Importing it does
    not import the compiler; calling this does."""
    return _compiled(backend_for(model), model.config, cache.batch_size, cache.max_length, cache.dtype)


@cache
def _compiled(backend: str | Callable[..., Any], config: ModelConfig, *sizes: object) -> Decode:
    """Compile a copy of `_decode`: torch counts graphs by the code that they are of, and a process that serves many
    models in many batches would run out of them."""
    step = FunctionType(_decode.__code__.replace(), _decode.__globals__)
    return with_room(torch.compile(step, fullgraph=True, dynamic=False, backend=backend))
