"""Activation checkpointing under a recipe: the recomputation must repeat the first run exactly.

It runs inside the backward pass, where the recipe's region has been left and delayed scaling has moved on. So the
first run notes the state and each module's live tensors and cached weights, in order, and the recomputation reads them
back. Checkpoints nest: a first run notes for all checkpoints around it, up to one that is being recomputed, and inside
that one everything comes from what its own first run noted.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from te_models.kernels.compiling import compiling
from te_models.kernels.gemm.float32 import gemm_float32

from ..quantizer.state import QuantizerState
from .context import Region, state
from .recipe_use import put_in_force

T = TypeVar("T")
Saved = list[Any] | Callable[..., Any]
"""Which results selective checkpointing saves: the results of a list of operators, or what a policy function says."""
_NAMES = ("compute", "calibrating", "first_microbatch", "noop", "statistics")


class FirstRun:
    """Notes what is in force, and the live state and the cached weight that each module gives out."""

    def __init__(self) -> None:
        self.values = {name: getattr(state(), name) for name in _NAMES}
        self.state_used: list[QuantizerState | Tensor] = []

    def __enter__(self) -> Self:
        state().runs.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        state().runs.pop()


class Replay:
    """One recomputation at work: what its first run gave out, from the beginning."""

    def __init__(self, first: FirstRun, selective: bool) -> None:
        self.rest = iter([_without_record(state_used, selective) for state_used in first.state_used])


class Recomputation(Region):
    """Restores what the first run noted, in the thread that the backward pass runs in. No amax is recorded once more,
    and statistics go to a tensor that nobody reads: a layer that notes them takes another path, and must take the same
    path again. selective: whether saved results take the place of operations. These are found by counting, so amaxes
    are computed again, too, for a tensor that nobody reads."""

    def __init__(self, first: FirstRun, *, selective: bool = False) -> None:
        super().__init__(**first.values)
        self.first = first
        self.selective = selective

    def __enter__(self) -> Self:
        super().__enter__()
        put_in_force(state().compute)
        state().runs.append(Replay(self.first, self.selective))
        return self

    def __exit__(self, *exc_info: object) -> None:
        state().runs.pop()
        super().__exit__(*exc_info)
        put_in_force(state().compute)


def _without_record(live: QuantizerState | Tensor, selective: bool) -> QuantizerState | Tensor:
    if isinstance(live, Tensor):  # a cached weight
        return live
    statistics = None if live.statistics is None else scratch_like(live.statistics)
    amax = None if live.amax is None or not selective else scratch_like(live.amax)
    return live._replace(amax=amax, statistics=statistics)


class _Both:
    """Two contexts, the second inside the first."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self.inner.__exit__(*exc_info)
        self.outer.__exit__(*exc_info)


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_IN_FLOAT32 = gemm_float32._opoverload
"""What stands in a graph in their place on a CPU that multiplies in float32."""


def recompute_contexts(save: Saved | None = None) -> tuple[Any, Any]:
    """Return contexts for the first run and the recomputation of a region under `torch.utils.checkpoint`.

    The recomputation runs under the recipe and the scales of the first run, wherever backward is called, and records
    nothing a second time. Pass it as `checkpoint(..., use_reentrant=False, context_fn=recompute_contexts)`.

    In a compiled function it may be given, too. save: operators, or a policy function, whose results are saved and not
    computed again, as torch's `create_selective_checkpoint_contexts` takes them:
    `context_fn=functools.partial(recompute_contexts, [torch.ops.aten.mm.default])`. Among operators, torch's products
    also cover the float32 products of graphs on a CPU; to a policy function these are
    `torch.ops.te_models.gemm_float32.default`.
    """
    if save is not None and not callable(save) and _PRODUCTS.intersection(save):
        save = [*save, _IN_FLOAT32]
    if TracingContext.try_get() is not None:
        # in a graph the compiler recomputes what it traced: no state is looked up a second time
        return create_selective_checkpoint_contexts(save or [])
    first = FirstRun()
    if save is None:
        return first, Recomputation(first)
    save_results, reuse_results = create_selective_checkpoint_contexts(save)
    return _Both(first, save_results), _Both(Recomputation(first, selective=True), reuse_results)


def recomputing() -> bool:
    """Whether a checkpointed region is being recomputed."""
    return any(isinstance(run, Replay) for run in state().runs)


def same_as_first_run(state_used: T) -> T:
    """Return what a module shall use now: what is given, or in a recomputation what its first run was given."""
    inside: list[FirstRun] = []
    for run in reversed(state().runs):
        if isinstance(run, Replay):
            state_used = next(run.rest)  # type: ignore[assignment]
            break
        inside.append(run)
    for first in inside:
        first.state_used.append(state_used)  # type: ignore[arg-type]
    return state_used


def once_per_checkpoint(make: Callable[[], T]) -> T:
    """Return `make()`, or in a recomputation, without calling it, what it returned in the first run.

    Selective checkpointing finds what it saved by counting operations, so it must not see the one call's operations.
    """
    if recomputing():
        return same_as_first_run(None)  # type: ignore[return-value]
    with _disable_current_modes() if state().runs else nullcontext():
        result = make()
    return same_as_first_run(result)


def scratch_like(tensor: Tensor) -> Tensor:
    """Return a tensor for a recomputation to write to instead of `tensor`, unseen by selective checkpointing."""
    with _disable_current_modes():
        return torch.zeros_like(tensor)


def refuse_around_a_graph() -> None:
    """Raise RuntimeError where a compiled layer with live state is called inside an activation checkpoint that is not
    compiled: a graph notes nothing for the recomputation, so that would read later scales or draw other bits."""
    if state().runs:
        raise RuntimeError(
            "a layer compiled under delayed scaling or stochastic rounding was called inside an eager activation "
            "checkpoint; compile the function that calls checkpoint"
        )


def refuse_without_contexts(pack_hook: object) -> None:
    """Raise RuntimeError where a layer with live state is called in torch's checkpoint without reentry and without
    `recompute_contexts`: its second run, in the backward pass, would read later scales or draw other bits.
    pack_hook: of the saved tensors here."""
    if not state().runs and getattr(pack_hook, "__module__", "") == "torch.utils.checkpoint":
        raise RuntimeError(
            "a layer under delayed scaling or stochastic rounding was called in torch.utils.checkpoint.checkpoint "
            "without context_fn, and would be computed again with other scales or bits; allowed: "
            "context_fn=te_models.layers.recompute_contexts, te_models.layers.checkpoint, or use_reentrant=True"
        )


def checkpointed(
    function: Callable[..., Any],
    *arguments: Any,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    save: Saved | None = None,
    **named: Any,
) -> Any:
    """Return `function(*arguments)`, saving only the arguments for the backward pass, in which it runs again. save: see
    `recompute_contexts`; not with a tracker."""
    if compiling():
        if get_rng_state_tracker is not None:
            raise ValueError(
                "get_rng_state_tracker is given in a compiled graph, which cannot set states; allowed: None"
            )
        # in a graph the compiler recomputes what it traced: no state is looked up a second time
        selective: dict[str, Any] = {} if save is None else {"context_fn": partial(recompute_contexts, save)}
        return checkpoint_of_torch(function, *arguments, use_reentrant=False, **selective, **named)
    contexts: Callable[[], tuple[Any, Any]] = recompute_contexts if save is None else partial(recompute_contexts, save)
    if get_rng_state_tracker is not None:
        contexts = partial(_contexts_with_tracker, get_rng_state_tracker)
    return checkpoint_of_torch(function, *arguments, use_reentrant=False, context_fn=contexts, **named)


def _contexts_with_tracker(get_rng_state_tracker: Callable[[], Any]) -> tuple[Any, Any]:
    first, again = recompute_contexts()
    states = dict(get_rng_state_tracker().get_states())
    return first, _Both(_TrackerStates(get_rng_state_tracker, states), again)


class _TrackerStates:
    """Gives a tracker of random states earlier states, and afterwards those that it had."""

    def __init__(self, get_rng_state_tracker: Callable[[], Any], states: dict[str, Any]) -> None:
        self.get_rng_state_tracker, self.states = get_rng_state_tracker, states
        self.present: dict[str, Any] = {}

    def __enter__(self) -> None:
        tracker = self.get_rng_state_tracker()
        self.present = dict(tracker.get_states())
        tracker.set_states(dict(self.states))

    def __exit__(self, *exc_info: object) -> None:
        self.get_rng_state_tracker().set_states(self.present)
