"""Memories of recurrent mixers: states of fixed size, each of all tokens so far; and of layers with two mixers.

B batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...config import MixerConfig

SNAPSHOTS = 32
"""How many earlier states a cache with `rollback` keeps at most, one per call."""


class StateMemory:
    """The states of one mixer, one tensor [B, *shape] for each of its configuration's `states`, zeros at first.

    in_place: `write` copies into the same tensors, for a graph that decodes every token; else it replaces them, and
    `crop` finds those behind earlier calls again, where `rollback` allows it.
    """

    def __init__(
        self,
        mixer: MixerConfig,
        batch_size: int,
        tp_size: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        *,
        rollback: int = 0,
        in_place: bool = False,
    ) -> None:
        self.states: tuple[Tensor, ...] = ()
        for state in mixer.states():
            shape = [n // tp_size if d == state.heads else n for d, n in enumerate(state.shape)]
            its = torch.float32 if state.dtype == "float32" else dtype
            self.states += (torch.zeros(batch_size, *shape, dtype=its, device=device),)
        self.rollback = rollback
        self.in_place = in_place
        self.length = 0
        self.earlier: list[tuple[int, tuple[Tensor, ...]]] = []

    def read(self) -> tuple[Tensor, ...]:
        """Return the states behind all tokens before this call's."""
        return self.states

    def write(self, *states: Tensor) -> None:
        """Store the states behind this call's tokens."""
        if self.in_place:
            for mine, new in zip(self.states, states, strict=True):
                mine.copy_(new)
        else:
            old = zip(self.states, states, strict=True)
            self.states = tuple(new.to(mine.dtype) for mine, new in old)

    def advance(self, length: int) -> None:
        """Count `length` tokens as read, and remember their states where they may be wanted again."""
        self.length = length
        if self.rollback:
            self.earlier = [*self.earlier[1 - SNAPSHOTS :], (length, self.states)]

    def nearest(self, length: int) -> int:
        """Return the largest number of tokens up to `length` whose states are known; 0 is always known."""
        return max((n for n, _ in self.known() if n <= length), default=0)

    def known(self) -> list[tuple[int, tuple[Tensor, ...]]]:
        """Return the numbers of tokens whose states are known, with these."""
        return [*self.earlier, (self.length, self.states)]

    def crop(self, length: int) -> None:
        """Go back to `length` tokens, `nearest` of something, or to none."""
        found = dict(self.known())
        if length == 0:
            self.reset()
        else:
            self.states, self.length = found[length], length
            self.earlier = [(n, states) for n, states in self.earlier if n <= length]

    def reset(self) -> None:
        """Forget everything."""
        self.length, self.earlier = 0, []
        self.write(*(torch.zeros_like(state) for state in self.states))

    @property
    def nbytes(self) -> int:
        """The bytes of the states, without earlier ones."""
        return sum(state.nbytes for state in self.states)


class PairMemory(NamedTuple):
    """The memories of a layer with two mixers side by side: of attention, and of the other one."""

    attention: object
    mixer: object
