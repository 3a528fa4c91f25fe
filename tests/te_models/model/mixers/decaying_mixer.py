"""The smallest recurrent mixer, for tests of what all have in common: s_t = decay s_(t-1) + v_t, output = W (s_t g_t).

B batch, S sequence, N heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from te_models.config import KINDS, MixerConfig, ModelConfig
from te_models.config.mixers import Parameter, State
from te_models.model.build import Build, make_input_linear, make_output_linear
from te_models.model.mixers import RECURRENT, MixerInputs, RecurrentMixer


@dataclass(frozen=True, kw_only=True)
class DecayingConfig(MixerConfig):
    """A sum of values that decays."""

    kind: ClassVar[str] = "decaying"

    heads: int
    """Number of heads."""
    channels: int = 4
    """Channels of each head."""
    decay: float = 0.5
    """Factor of the state at each token."""

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        size = self.heads * self.channels
        yield Parameter("linear_in.weight", (2 * size, hidden_size), (size, size))
        yield Parameter("linear_proj.weight", (hidden_size, size), (size,), 1)

    def states(self) -> tuple[State, ...]:
        return (State("sum", (self.heads, self.channels)),)

    def flops(self, length: float) -> float:
        return 2.0 * self.heads * self.channels

    def shared_sizes(self) -> dict[str, int]:
        return {"heads": self.heads}


class DecayingMixer(RecurrentMixer):
    def __init__(self, config: ModelConfig, mixer: DecayingConfig, layer: int, build: Build) -> None:
        super().__init__()
        self.mixer = mixer
        size = mixer.heads * mixer.channels
        self.linear_in = make_input_linear(config, (size, size), False, build, normed=False)
        self.linear_proj = make_output_linear(config, size, False, build)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        rows = self.linear_in(x)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        v, gate = rows.unflatten(-1, (2, -1, self.mixer.channels)).unbind(2)
        if inputs.token_mask is not None:
            v = v * inputs.token_mask[..., None, None]
        (state,) = (torch.zeros_like(v[:, 0], dtype=torch.float32),) if cache is None else cache.read()
        texts, found = inputs.documents, []
        for t in range(v.shape[1]):
            if texts is not None and t:
                state = state * (texts[:, t] == texts[:, t - 1])[:, None, None]
            state = self.mixer.decay * state + v[:, t]
            found.append(state * gate[:, t])
        if cache is not None:
            cache.write(state)
        y = torch.stack(found, dim=1).flatten(2).to(x.dtype)
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kind known while a test runs."""
    monkeypatch.setitem(KINDS, DecayingConfig.kind, DecayingConfig)
    monkeypatch.setitem(RECURRENT, DecayingConfig.kind, DecayingMixer)
