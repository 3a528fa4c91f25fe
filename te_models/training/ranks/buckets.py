"""Gradients of whole parameters, averaged over ranks in buckets, after or while a backward pass runs.

A bucket is a list of parameters whose gradients travel in one all-reduce. At most `IN_FLIGHT` of them hold a copy of
gradients at a time, so that averaging takes memory for some buckets and not for another set of all gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from te_models.kernels.torch_versions import start_to_scatter_single
from te_models.layers import gradient_of

from ...parallel.parts import ShardOfParameter

T = TypeVar("T")
BUCKET = 64 * 2**20
"""Bytes of gradients that one all-reduce sends: enough for the bandwidth of a network, few beside a model."""
IN_FLIGHT = 2
"""Buckets that hold copies of gradients at a time."""


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are summed over `group` together (None: the default group) and divided by `count`.
    communicates: whether other ranks have these gradients at all."""

    group: dist.ProcessGroup | None
    count: int
    communicates: bool = True
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    _flat: torch.Tensor | None = None
    _work: Any = None
    _gradients: list[torch.Tensor] = field(default_factory=list)

    @torch.no_grad()
    def start(self) -> None:
        """Start to sum the gradients. A parameter without one must lack it on all ranks."""
        found = [gradient_of(parameter) for parameter in self.parameters]
        self._gradients = [gradient for gradient in found if gradient is not None]
        if not self.communicates or not self._gradients:
            return
        first = self._gradients[0]
        alone = len(self._gradients) == 1 and first.is_contiguous()
        self._flat = first.view(-1) if alone else torch.cat([gradient.reshape(-1) for gradient in self._gradients])
        self._work = dist.all_reduce(self._flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums, and put the averages in place of the gradients."""
        gradients, flat = self._gradients, self._flat
        if self._work is not None:
            self._work.wait()
        self._gradients, self._flat, self._work = [], None, None
        if flat is None:
            for gradient in gradients:
                gradient.div_(self.count)
            return
        flat.div_(self.count)
        if flat.data_ptr() != gradients[0].data_ptr():
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


@dataclass(eq=False)
class ScatteredBucket(Bucket):
    """Parameters of each of which this rank needs a part of the gradient: it receives the sums of that, and leaves the
    rest of the gradients as its own backward pass gave them. places: the part of a parameter, by its id."""

    places: Mapping[int, ShardOfParameter] = field(default_factory=dict)
    _own: list[torch.Tensor] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _sent: torch.Tensor | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Start to sum the gradients. A parameter without one must lack it on all ranks."""
        found = [(gradient_of(parameter), self.places[id(parameter)]) for parameter in self.parameters]
        pairs = [(gradient, place) for gradient, place in found if gradient is not None]
        self._own = [place.of_whole(gradient) for gradient, place in pairs]
        if not self.communicates or not pairs:
            return
        ranks = pairs[0][1].ranks
        self._sizes = [place.elements(gradient) for gradient, place in pairs]
        sent = pairs[0][0].new_empty(ranks, sum(self._sizes))
        for (gradient, place), rows in zip(pairs, sent.split(self._sizes, dim=1), strict=True):
            if place.ranks * place.each > gradient.shape[0]:
                rows.zero_()
            for own, its in place.shared_with(gradient, rows):
                its.copy_(own)
        self._sent = sent.view(-1)
        self._flat = sent.new_empty(sent.shape[1])
        self._work = start_to_scatter_single(self._flat, self._sent, self.group)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums, and put the averages in place of this rank's parts of the gradients."""
        own, flat = self._own, self._flat
        if self._work is not None:
            self._work.wait()
        self._own, self._flat, self._sent, self._work = [], None, None, None
        if flat is None:
            for part in own:
                part.div_(self.count)
            return
        for part, sums in zip(own, flat.div_(self.count).split(self._sizes), strict=True):
            part.copy_(sums[: part.numel()].view(part.shape))


def filled(bucket: Callable[[], Bucket], parameters: Iterable[torch.nn.Parameter], limit: int) -> Iterator[Bucket]:
    """Yield buckets of `bucket()` that have the parameters in their order, a dtype of gradients and about `limit` bytes
    each."""
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(_gradient_dtype(parameter), []).append(parameter)
    for dtype, members in by_dtype.items():
        sizes = [parameter.numel() * dtype.itemsize for parameter in members]
        for some in runs_of_size(members, sizes, limit):
            current = bucket()
            current.parameters += some
            yield current


def runs_of_size(items: Sequence[T], sizes: Sequence[int], limit: int) -> Iterator[list[T]]:
    """Yield consecutive items whose sizes add up to `limit` at most, or one item that is larger."""
    found: list[T] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if total and total + size > limit:
            yield found
            found, total = [], 0
        found.append(item)
        total += size
    if found:
        yield found


def _gradient_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    for tensor in (getattr(parameter, "main_grad", None), parameter.grad):
        if tensor is not None:
            return tensor.dtype
    return parameter.dtype


class InOrder:
    """Buckets that all ranks sum in one order, each once a step.

    Collectives meet by their order, and a rank's backward pass may reach gradients in another one than a second rank's.
    So a bucket starts when its gradients and the gradients of all buckets before it are complete, and what a backward
    pass does not reach starts at the end.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._place = {id(p): place for place, bucket in enumerate(buckets) for p in bucket.parameters}
        self._missing = [0] * len(buckets)
        self._next, self._running, self._armed = 0, list[Bucket](), False
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Have backward passes inside `last_backward` start buckets as their gradients become complete."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                # also called for a weight whose layer added its gradient to `main_grad` and gave autograd none
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                self._hooks.append((node, node.register_hook(partial(self._arrived, id(parameter)))))

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Inside is the backward pass that completes the gradients of a step."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._armed = bool(self._hooks)
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Sum what has not been summed, and wait for all."""
        while self._next < len(self.buckets):
            self._start_next()
        while self._running:
            self._running.pop(0).finish()
        self._next = 0

    def _arrived(self, key: int, *_: Any) -> None:
        if not self._armed:
            return
        place = self._place[key]
        if place < self._next:
            raise RuntimeError("a backward pass added to a gradient that the ranks have begun to average")
        self._missing[place] -= 1
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._start_next()

    def _start_next(self) -> None:
        while len(self._running) >= IN_FLIGHT:
            self._running.pop(0).finish()
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.start()
        self._running.append(bucket)
