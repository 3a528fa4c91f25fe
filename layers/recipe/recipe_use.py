"""What recipes a layer ran under, and what a recipe that goes by names means for it.

A layer looks up what such a recipe means for it when it first runs under it. A name must not get into a compiled
graph, though: it would be guarded on, and a block that layers share would be compiled once for each of them. So while
a graph is traced, every layer that exists looks it up, outside of the graph, and from then on whenever a region is
entered outside of compiled code; graphs are guarded on what was found, and that is the same for many layers.

What a layer writes down while it runs goes through `untracked_side_effect`, also inside an activation checkpoint that
is compiled. The compiler refuses such writing there, since the recomputation would not repeat it. It need not: it would
write the same recipe, and must not draw a second key. What else a checkpointed function writes is refused as before.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, Protocol

import torch

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import constant_when_traced

from .base import GemmQuantizers, Recipe
from .context import state


def untracked_side_effect(write: Callable[..., None], *arguments: Any) -> None:
    """Call `write(*arguments)` to set attributes; in a graph, once for each call of it and not again in the
    backward pass."""
    if compiling():
        from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as let_through

        let_through(write, *arguments)
    else:
        write(*arguments)


Choice = tuple[Recipe | None, GemmQuantizers | None]
"""The recipe of one layer and its quantizers; (None, None): high precision."""


class Layer(Protocol):
    """What recipes know of a layer, see `QuantizedModule`."""

    kind: str
    recipe_use: RecipeUse

    @property
    def name(self) -> str: ...


class LastUse(NamedTuple):
    """The last eager call, where it needs no other choice and no other record when the same recipe is in force again.
    asked, ran: as in `RecipeUse`."""

    asked: str | None
    ran: str | None
    recipe: Recipe | None
    quantizers: GemmQuantizers | None


class ThreadUse:
    """What one thread's region has to do with a module. recorded, calibrated: whether its exit shall update the scales,
    see `leave_region`. chosen: what the recipe that the thread last brought into force means for the module, None if
    that has to be looked up."""

    def __init__(self) -> None:
        # since the outermost autocast region began, under delayed scaling: amaxes noted in training; in a calibration,
        # or of the weights that training will use
        self.recorded = self.calibrated = False
        self.chosen: Choice | None = None
        self.chosen_for: Recipe | None = None


class _OfThread(threading.local):
    """now: the state of the thread that reads it. `everyone` has the state of each live thread, by `id`."""

    def __init__(self, everyone: MutableMapping[int, ThreadUse]) -> None:
        self.now = ThreadUse()
        everyone[id(self.now)] = self.now


class RecipeUse:
    """What recipes a module ran under: the names of its last forward pass in any thread, for `recipe_report` (the one
    asked for and the one that ran), and what concerns this thread.

    A separate object because every call writes it, and setting an attribute of a module costs a microsecond.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # None: there was no forward pass yet
        self.ran: str | None = None
        self.last: LastUse | None = None
        self._everyone: weakref.WeakValueDictionary[int, ThreadUse] = weakref.WeakValueDictionary()
        self.in_thread = _OfThread(self._everyone)

    def __getstate__(self) -> dict[str, Any]:
        """Leave other threads out of copies, and the recipe in force: it may hold a function that cannot be pickled."""
        use = self.in_thread.now
        return {"asked": self.asked, "ran": self.ran, "recorded": use.recorded, "calibrated": use.calibrated}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.asked, self.ran = values["asked"], values["ran"]
        self.in_thread.now.recorded, self.in_thread.now.calibrated = values["recorded"], values["calibrated"]

    def all_threads(self) -> list[ThreadUse]:
        """Return what concerns each of the threads that live and have asked."""
        uses = [reference() for reference in self._everyone.valuerefs()]
        return [use for use in uses if use is not None]

    def forget_choices(self) -> None:
        """Have every thread look up again what its recipe means for the module."""
        for use in self.all_threads():
            use.chosen = use.chosen_for = None

    def records_elsewhere(self) -> bool:
        """Whether the module records amaxes in a region of another thread now."""
        own, everyone = self.in_thread.now, self.all_threads()
        return len(everyone) > 1 and any(use is not own and (use.recorded or use.calibrated) for use in everyone)

    def refuse_two_regions(self, module: Layer) -> None:
        """Raise RuntimeError where the module records amaxes in a region of another thread: the scales that the exit of
        one of them makes would be of both passes, or of half of one."""
        if self.records_elsewhere():
            raise RuntimeError(
                f"{module.name or module.kind} records amaxes for DelayedScaling in autocast regions of two threads at "
                "once; allowed: one region at a time, a copy of the model for each thread, or model.eval()"
            )


def recipe_for_layer(recipe: Recipe, module: Layer) -> Choice:
    """Return what a recipe that goes by names means for a layer."""
    own = recipe.for_module(module.name)
    return own, None if own is None else own.quantizers(module.kind, module.name)


def choose_once(recipe: Recipe, module: Layer) -> Choice:
    """Return `recipe_for_layer`, which is called when the layer first runs under this recipe."""
    use = module.recipe_use.in_thread.now
    if compiling():
        _choose_before_tracing()
        return (use.chosen if state().chosen else None) or recipe_for_layer(recipe, module)
    if use.chosen_for is not recipe or use.chosen is None:
        use.chosen, use.chosen_for = recipe_for_layer(recipe, module), recipe
    return use.chosen


_ordinals = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_layer(layer: Layer) -> int:
    """Let `live_modules` return this layer while it exists; return how many were registered before."""
    ordinal = next(_ordinals)
    _layers[ordinal] = layer
    return ordinal


def live_modules() -> list[Any]:
    """Return the existing layers in the order of their construction."""
    # a list at once, because other threads may build modules meanwhile; and one may be freed
    found = [(reference.key, reference()) for reference in _layers.valuerefs()]  # type: ignore[attr-defined]
    return [layer for _, layer in sorted(found, key=lambda item: item[0]) if layer is not None]


def put_in_force(recipe: Recipe | None) -> None:
    """Let layers run under this recipe now."""
    s = state()
    s.compute = recipe
    s.by_region = recipe is not None and not (torch.compiler.is_compiling() and compiling())
    s.chosen = _Traced.anything and s.by_region and _choose_for_all(recipe)


class _Traced:
    """Whether a graph was traced in which a layer ran under a recipe that goes by names."""

    anything = False


@constant_when_traced
def _choose_before_tracing() -> bool:
    """Let all layers look up what the recipe in force means for them, at the time of tracing and not in the graph."""
    s = state()
    if s.compute is not None and s.compute.by_name and s.by_region and not s.chosen:
        _Traced.anything = True
        s.chosen = _choose_for_all(s.compute)
    return True


def _choose_for_all(recipe: Recipe | None) -> bool:
    """Let layers look up what a recipe means for them, if it goes by names, and return whether they have."""
    if recipe is None or not recipe.by_name:
        return False
    for layer in live_modules():
        use = layer.recipe_use.in_thread.now
        if use.chosen_for is not recipe:
            use.chosen_for = recipe
            try:
                use.chosen = recipe_for_layer(recipe, layer)
            except Exception:  # raised again where the layer runs, if it does: it may be another model's
                use.chosen = None
    return True
