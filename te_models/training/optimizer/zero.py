"""The update of whole parameters shared by the ranks that hold them (ZeRO-1, arXiv 1910.02054): each keeps the moments
and the master of a part of every parameter, steps it, and gets the other parts from the ranks that stepped them.

A part is a view of some rows of the parameter, so that the state of a step is what FSDP2's shards have, and checkpoints
name it alike. Gradients are whole until a step's last backward pass, as every pipeline schedule allows; then each
rank receives the sums of its parts alone (`ScatteredBucket`). The update of an element is the one that a rank with
all of them would make.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.kernels.torch_versions import gather_single
from te_models.layers import QuantizedTensor, gradient_of

from ...config import ConfigError
from ...parallel.parts import ShardOfParameter
from ..ranks.buckets import BUCKET, runs_of_size
from ..ranks.data_parallel import Ranks

GroupOf = Callable[[Tensor], tuple[dist.ProcessGroup | None, int, int]]
"""Of a parameter: the ranks that hold it (None: all), this one's number among them, and how many they are."""


@dataclass(eq=False)
class _Part:
    """A parameter, this rank's part of it, and the ranks that have the others."""

    whole: nn.Parameter
    own: nn.Parameter
    place: ShardOfParameter
    group: dist.ProcessGroup | None


class SharedUpdate:
    """This rank's parts of parameters, and what makes the parameters whole after a step.

    Raises ConfigError for weights that are stored quantized, whose blocks a part would cut.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group_of: GroupOf) -> None:
        self._parts: dict[str, _Part] = {}
        for name, whole in parameters.items():
            if isinstance(whole, QuantizedTensor):
                raise ConfigError(
                    "parallel.use_distributed_optimizer is True; allowed with precision.quantized_weights: False"
                )
            group, rank, ranks = group_of(whole)
            place = ShardOfParameter(rank, ranks, 0, -(-whole.shape[0] // ranks))
            own: Any = nn.Parameter(place.of_whole(whole.detach()))
            own.shard_place = place
            main_grad = getattr(whole, "main_grad", None)
            if main_grad is not None:
                own.main_grad = place.of_whole(main_grad)
            self._parts[name] = _Part(whole, own, place, group)
        self.own: dict[str, nn.Parameter] = {name: part.own for name, part in self._parts.items()}
        self._buckets = list(self._filled())

    def _filled(self) -> Iterator[list[_Part]]:
        kinds: dict[Any, list[_Part]] = {}
        for part in self._parts.values():
            if part.place.ranks > 1:
                kinds.setdefault((part.whole.dtype, id(part.group)), []).append(part)
        for members in kinds.values():
            sizes = [part.place.elements(part.whole) * part.place.ranks * part.whole.element_size() for part in members]
            yield from runs_of_size(members, sizes, BUCKET)

    @property
    def places(self) -> dict[int, ShardOfParameter]:
        """Which part of each parameter this rank steps, by the parameter's id."""
        return {id(part.whole): part.place for part in self._parts.values()}

    def groups(self, name: str) -> tuple[dist.ProcessGroup | None, ...]:
        """Return the ranks over which a parameter is divided here: none where one rank steps it all."""
        part = self._parts[name]
        return (part.group,) if part.place.ranks > 1 else ()

    def take_gradients(self) -> None:
        """Have each part's gradient be its part of the parameter's."""
        for part in self._parts.values():
            gradient = gradient_of(part.whole)
            if getattr(part.own, "main_grad", None) is None:
                part.own.grad = None if gradient is None else part.place.of_whole(gradient)

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters whole: each rank gets the parts of the others; called by all of them."""
        for part in self._parts.values():
            part.own.grad = None
        for bucket in self._buckets:
            first = bucket[0]
            sent = torch.cat([part.place.filled_up(part.whole.detach()) for part in bucket])
            received = sent.new_empty(first.place.ranks * sent.numel())
            gather_single(received, sent, first.group)
            by_part = received.view(first.place.ranks, -1).split([p.place.elements(p.whole) for p in bucket], dim=1)
            for part, rows in zip(bucket, by_part, strict=True):
                for own, its in part.place.shared_with(part.whole.detach(), rows):
                    own.copy_(its)


def ranks_that_hold(ranks: Ranks, experts: Any) -> GroupOf:
    """Return what says which ranks hold a parameter. ranks: over which gradients are averaged; experts: `ExpertRanks`,
    whose parameters only those with the same ones hold."""

    def group_of(parameter: Tensor) -> tuple[dist.ProcessGroup | None, int, int]:
        if experts is not None and experts.owns(parameter):
            return experts.copies, experts.copies.rank(), experts.copies.size()
        return ranks.group, ranks.rank, ranks.world_size

    return group_of
