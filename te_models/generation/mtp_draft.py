"""A draft of the model's own: its layers that predict further tokens (multi-token prediction) propose them.

L tokens, K proposed tokens, H hidden, V vocabulary; depths count from 1, as in `te_models.model.mtp`.
"""

from typing import cast

import torch
from torch import Tensor

from te_models.kernels.without_autocast import compute_dtype

from ..model import GPTModel, KVCache
from ..model.mtp import MultiTokenPredictionLayer
from .sampling import Sampler
from .speculative import Draft, shared_length


class _Depth:
    """What one depth has read: keys and values, and the results at positions that no later token changes."""

    def __init__(
        self, layer: MultiTokenPredictionLayer, cache: KVCache, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layer, self.cache = layer, cache
        self.results = torch.empty(1, 0, width, dtype=dtype, device=device)


class MTPDraft(Draft):
    """The layers of multi-token prediction of a model as the draft of its text.

    A model of D depths proposes up to D tokens at a time. A draft of a single depth, as in published models, proposes
    any number of tokens: the layer goes on from its own result as if it were the model's hidden state. It was not
    trained on that, so each further token is less often the model's.

    Example:
        model = GPTModel.from_pretrained(folder, mtp=True).eval()
        draft = MTPDraft()
        generate(model, input_ids, 100, draft_model=draft, num_draft_tokens=2)
        print(draft.acceptance_rate)
    """

    needs_hidden_states = True

    def __init__(self) -> None:
        self._model: GPTModel | None = None
        self._depths: list[_Depth] = []
        self._read = torch.empty(0, dtype=torch.int64, device="cpu")

    def begin(self, model: GPTModel, max_length: int) -> None:
        """As `Draft.begin`. Raises ValueError for a model without multi-token prediction."""
        if model.mtp is None:
            raise ValueError(
                "the model has no layers that predict further tokens; allowed: one with mtp_num_layers above 0, which "
                "GPTModel.from_pretrained(folder, mtp=True) makes of a folder that has such layers"
            )
        weight, config = model.embedding.word_embeddings.weight, model.config
        dtype, last = compute_dtype(weight), (config.num_layers - 1,)
        self._model, self._read = model, torch.empty(0, dtype=torch.int64, device=weight.device)
        self._depths = []
        for layer in model.mtp.layers:
            cache = KVCache(config, 1, max_length, dtype=dtype, device=weight.device, rollback=max_length, layers=last)
            depth = cast(MultiTokenPredictionLayer, layer)
            self._depths.append(_Depth(depth, cache, config.hidden_size, dtype, weight.device))
        self.most = None if len(self._depths) == 1 else len(self._depths)

    def propose(
        self, tokens: Tensor, hidden_states: Tensor | None, count: int, sampler: Sampler
    ) -> tuple[Tensor, Tensor]:
        """As `Draft.propose`."""
        assert self._model is not None and hidden_states is not None, "begin, needs_hidden_states"
        text, length = tokens[0], tokens.shape[1]
        same = min(shared_length(self._read, text), length - 1)
        for number, depth in enumerate(self._depths, 1):  # position i of depth k has read tokens up to i + k
            depth.cache.crop(min(depth.cache.length, max(0, same - number)))
            depth.results = depth.results[:, : depth.cache.length]
        self._read = text
        chosen: list[Tensor] = []
        distributions: list[Tensor] = []
        below = hidden_states
        for step in range(count):
            number = min(step, len(self._depths) - 1)
            depth = self._depths[number]
            if step > number:  # a single depth goes on behind its own result
                begin, below = length - 2 + step, self._run(depth, text, below[:, -1:], length - 2 + step, 1)
            else:
                begin = depth.cache.length
                found = self._run(depth, text, below[:, begin:], begin, number + 1)
                below = depth.results = torch.cat((depth.results, found), dim=1)
            distributions.append(sampler.probabilities(self._logits(below[:, -1:])))
            chosen.append(sampler.draw(distributions[-1]))
            text = torch.cat((text, chosen[-1]))
        return torch.cat(chosen), torch.cat(distributions)

    def _run(self, depth: _Depth, text: Tensor, below: Tensor, begin: int, ahead: int) -> Tensor:
        """Return a depth's results, [1, P, H], at the P positions from `begin` of what the depth below gives there."""
        model = cast(GPTModel, self._model)
        count = below.shape[1]
        positions = torch.arange(begin, begin + count, device=below.device)[None]
        follow = positions + ahead
        embedded = model.embedding(text[follow[0]][None], follow, None)
        inputs = model.decoder.layer_inputs(below, positions, None, depth.cache)
        result, *_ = depth.layer(below, embedded, model.decoder, inputs)
        depth.cache.advance(count)
        return result

    def _logits(self, x: Tensor) -> Tensor:
        """x: [1, 1, H] -> [1, V]."""
        model = cast(GPTModel, self._model)
        logits, _, _ = model.output_layer(x, model.shared_output_weight, None, return_logits=True)
        assert logits is not None
        return logits[:, -1]
