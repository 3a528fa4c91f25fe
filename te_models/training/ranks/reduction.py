"""When the gradients of a step become averages over the ranks: while the backward pass of its last micro-batch runs,
or, of parameters that FSDP2 shards, after each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from te_models.layers import gradient_of
from te_models.layers.tensor.fsdp import local_part

from .buckets import BUCKET, InOrder
from .data_parallel import Ranks, gradient_buckets

if TYPE_CHECKING:
    from ..optimizer.adamw import Optimizer


class Reduction:
    """Averages the gradients of an optimizer's parameters over the ranks that hold different data or sequence parts.

    Args:
        optimizer: Whose gradients, and whose experts; these are averaged only over the ranks that hold them.
        ranks: Whose gradients are averaged.
        model: With modules that FSDP2 shards; `once` is about these; None: reduced after each micro-batch.
        once: FSDP2 keeps the whole gradients of a step, and reduces their sums in its last backward pass.
        overlaps: Whole gradients are summed while the last backward pass runs. That needs a separate backward pass for
        each micro-batch.
        limit: Bytes of gradients that travel together.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: Ranks,
        model: nn.Module | None = None,
        *,
        once: bool = False,
        overlaps: bool = False,
        limit: int = BUCKET,
    ) -> None:
        self.optimizer = optimizer
        whole = [p for p in optimizer.parameters.values() if local_part(p) is p]
        whole.reverse()  # about the order in which a backward pass completes gradients
        experts = optimizer.experts
        of_few = {} if experts is None else {"distributed": experts.parameters, "copies": experts.copies}
        self._buckets = InOrder(gradient_buckets(whole, ranks, **of_few, limit=limit, places=optimizer.places))
        if overlaps:
            self._buckets.watch()
        self._sharded = sharded_roots(model) if once and model is not None else []

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Inside is the backward pass of a micro-batch."""
        for module in self._sharded:
            module.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        if not last:
            yield
            return
        with self._buckets.last_backward():
            yield

    @torch.no_grad()
    def finish(self) -> None:
        """Have all gradients be averages. FSDP2 has averaged its shards already, experts over those who have them."""
        self._buckets.finish()
        experts = self.optimizer.experts
        for parameter in () if experts is None else experts.parameters:
            gradient = gradient_of(parameter)
            if gradient is not None and local_part(parameter) is not parameter:
                assert experts is not None
                local_part(gradient).div_(experts.token_shares)


def sharded_roots(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that FSDP2 shards."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


def reduce_gradients(optimizer: Optimizer, ranks: Ranks) -> None:
    """Average the gradients of a step over the ranks, after its last micro-batch."""
    Reduction(optimizer, ranks).finish()
