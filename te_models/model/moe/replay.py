"""Router replay: the experts that a mixture chose while it sampled are chosen again while it learns from the samples.

A router decides by scores that differ in their last bits between two ways to compute them (with a cache and without,
compiled and eager, other weights after a step). Where it then chooses other experts, log-probabilities jump, and with
them the ratios that policy gradients multiply with (arXiv 2510.11370 measures it). A record holds the choices; weights
of the chosen experts are still computed from the router's scores, so that these learn as always.

B rows, S columns, K experts per token, L layers with experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from ..cache.static import StaticStep
from .router import Router

if TYPE_CHECKING:
    from ..gpt import GPTModel


class RouterRecord:
    """The experts that each token was sent to, in every layer of a mixture.

    indices: int64 [L, B, S, K], -1 where the router may choose by itself; None: nothing is recorded yet. A column
    is a token that the model was called with; the last token of a generated text is not read, so that a
    record of it has a column less.

    Example:
        record = RouterRecord()
        with record.recording(model):
            tokens = generate(model, prompts, 20, temperature=1.0)
        with record.replaying(model, length=tokens.shape[1]):
            logprobs(model, tokens).sum().backward()
    """

    def __init__(self, indices: Tensor | None = None) -> None:
        if indices is not None and (indices.dim() != 4 or indices.is_floating_point()):
            raise ValueError(
                f"indices has shape {list(indices.shape)} and dtype {indices.dtype}; allowed: integers [layers with "
                "experts, rows, columns, experts of a token]"
            )
        self.indices = indices

    @contextlib.contextmanager
    def recording(self, model: Any) -> Iterator[RouterRecord]:
        """Record the calls of a model inside, in place of what was recorded before.

        model: a `GPTModel`, or a `TEModelForCausalLM`. Calls with a cache add columns behind those in the cache, and
        overwrite what was taken back from it; a call without one begins again. Rows are the calls': what
        reorders the rows of a cache (beam search) cannot be recorded. Raises ValueError for a model without experts,
        one whose ranks share sequences, and where no call was recorded: of compiled calls only the
        calls of `generate(compile=True)` are.
        """
        gpt = _gpt(model)
        routers = routers_of(gpt)
        if gpt.context_shard is not None:
            raise ValueError(
                "a model whose ranks share sequences cannot be recorded; allowed: without context parallelism"
            )
        if gpt.router_record is not None:
            raise ValueError("this model is being recorded by another RouterRecord; allowed: one at a time")
        self.indices = None
        gpt.router_record = self
        for router in routers.values():
            router.recorded = True
        try:
            yield self
        finally:
            gpt.router_record = None
            for router in routers.values():
                router.recorded = False
        if self.indices is None:
            raise ValueError(
                "nothing was recorded: no call of the model inside was eager; allowed: eager calls, and "
                "generate(compile=True)"
            )

    def write(self, indices: Tensor, begin: int) -> None:
        """Take the choices of a call, int64 [L, B, S, K], as the choices of columns begin to begin + S - 1."""
        before = self.indices
        if begin and before is not None:
            if before.shape[2] < begin or before.shape[:2] != indices.shape[:2]:
                raise ValueError(
                    f"a call of {list(indices.shape[1:3])} tokens behind {begin} in its cache does not continue a "
                    f"record of {list(before.shape[1:3])}; allowed: calls with one cache, from its beginning on"
                )
            indices = torch.cat([before[:, :, :begin], indices], 2)
        elif begin:
            raise ValueError(f"a call begins behind {begin} tokens that were not recorded; allowed: from the prompt on")
        self.indices = indices.detach()

    @contextlib.contextmanager
    def replaying(self, model: Any, *, rows: slice | Tensor | None = None, length: int | None = None) -> Iterator[None]:
        """Have the routers of a model choose the experts of this record inside; backward passes belong inside, too.

        model: as for `recording`, or a pipeline stage of it. rows: the rows of the record that the calls inside have,
        as of a micro-batch; None: all. length: the columns of the calls; the router chooses by itself in those behind
        the record's (None: as many as the record has). Every call inside has these rows and columns; it raises
        ValueError otherwise. Raises ValueError for an empty record, one of another model's layers or experts, and a
        length below the record's.
        """
        gpt = _gpt(model)
        routers = routers_of(gpt)
        indices = self.indices
        if indices is None:
            raise ValueError("the RouterRecord is empty; allowed: one with indices, or after recording")
        self._check(gpt, indices)
        indices = indices if rows is None else indices[:, rows]
        columns = indices.shape[2]
        if length is not None and length < columns:
            raise ValueError(f"length is {length}; allowed for a record of {columns} columns: {columns} or more")
        indices = torch.nn.functional.pad(indices, (0, 0, 0, (length or columns) - columns), value=-1)
        places = list(_layers(gpt.whole or gpt))
        before = {number: router.replayed for number, router in routers.items()}
        for number, router in routers.items():
            router.replayed = indices[places.index(number)].to(router.weight.device)
        try:
            yield
        finally:
            for number, router in routers.items():
                router.replayed = before[number]

    def _check(self, gpt: GPTModel, indices: Tensor) -> None:
        moe = (gpt.whole or gpt).config.moe
        assert moe is not None, "the model has routers"
        layers, topk = len(_layers(gpt.whole or gpt)), moe.moe_router_topk
        if indices.shape[0] != layers or indices.shape[3] != topk:
            raise ValueError(
                f"the RouterRecord has {indices.shape[0]} layers of {indices.shape[3]} experts per token; allowed for "
                f"this model: {layers} layers of {topk}"
            )
        top = int(indices.max()) if indices.numel() else -1
        if top >= moe.num_moe_experts:
            raise ValueError(
                f"the RouterRecord names expert {top}; allowed for this model: below {moe.num_moe_experts}"
            )


def record_call(model: GPTModel, indices: Tensor | None, begin: int, cache: Any = None) -> None:
    """Give the record of a model, where one is recording, the choices of a call behind `begin` cached tokens; a step of
    a static cache knows their number itself. What is compiled returns the choices to its caller instead."""
    if model.router_record is None or indices is None or compiling():
        return
    model.router_record.write(indices, int(cache.position) if isinstance(cache, StaticStep) else begin)


def _layers(gpt: GPTModel) -> list[int]:
    """Return the numbers of a whole model's layers with experts."""
    return [i for i in range(gpt.config.num_layers) if gpt.config.is_moe_layer(i)]


def routers_of(gpt: GPTModel) -> dict[int, Router]:
    """Return the routers of a model, or of a stage, by the number of their layer. Raises ValueError without any."""
    named = cast(Any, gpt.decoder.layers)._modules.items()
    found = {int(name): layer.mlp.router for name, layer in named if layer.is_moe}
    if not found:
        raise ValueError("this model has no experts, so there are no choices to record or replay")
    return found


def _gpt(model: Any) -> GPTModel:
    """Return the `GPTModel` of a model that has one, as `TEModelForCausalLM` does."""
    return getattr(model, "gpt", model)
