"""The recipe in force: `autocast` for what layers compute, `quantized_model_init` for what they store.

The state is one plain module-level object, not a ContextVar: the compiler traces its attributes, guards on the recipe's
fields (an equal recipe re-created for the next step costs nothing) and follows regions opened inside a compiled
function. The context managers nest, also one object in itself, and restore what was before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from .recipe import Recipe
from .recipe_use import choose_for_all
from .recipes import Float8CurrentScaling

if TYPE_CHECKING:
    import torch.distributed as dist

    from .quantized_module import QuantizedModule


class _State:
    """What the innermost regions say. compute, storage: None is high precision. chosen: whether the live modules know
    what `compute` means for them, see `recipe_use`. touched: in a region opened inside a compiled function, the modules
    that recorded amaxes; None elsewhere, where all live modules are asked."""

    def __init__(self) -> None:
        self.compute: Recipe | None = None
        self.chosen = False
        self.storage: Recipe | None = None
        self.preserve_init_val = False
        self.calibrating = False
        self.amax_reduction_group: dist.ProcessGroup | None = None
        self.first_microbatch: bool | None = None
        self.keep_kept: Tensor | None = None
        self.statistics = False
        self.depth = 0
        self.touched: list[QuantizedModule] | None = None


_STATE = _State()


def state() -> _State:
    """Return what is in force now; only the context managers write to it."""
    return _STATE


def current_recipe() -> Recipe | None:
    """Return the recipe layers run under now, or None."""
    return _STATE.compute


def storage_recipe() -> Recipe | None:
    """Return the recipe whose weight format new layers store their weights in, or None."""
    return _STATE.storage


def _checked(enabled: bool, recipe: Recipe | None) -> Recipe | None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {recipe!r}; allowed: a Recipe such as MXFP8BlockScaling(), or None")
    if not enabled:
        return None
    return Float8CurrentScaling() if recipe is None else recipe


class _Region:
    """A context manager that sets attributes of the state and restores them."""

    def __init__(self, **values: Any) -> None:
        self._values = values
        self._previous: list[dict[str, Any]] = []  # one for each time that it is entered and not yet left

    def __enter__(self) -> Self:
        self._previous.append({name: getattr(_STATE, name) for name in self._values})
        for name, value in self._values.items():
            setattr(_STATE, name, value)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name, value in self._previous.pop().items():
            setattr(_STATE, name, value)


def _live() -> list[QuantizedModule]:
    from .quantized_module import live_modules

    return live_modules()


def put_in_force(recipe: Recipe | None) -> None:
    """Let layers run under this recipe now."""
    _STATE.compute = recipe
    _STATE.chosen = choose_for_all(recipe, _live)


class autocast:
    """Run the layers inside under `recipe` (None: Float8CurrentScaling). Transformer Engine: `te.autocast`.

    enabled=False: high precision. calibrating: high-precision layers record amaxes for a later run under
    DelayedScaling. amax_reduction_group: the process group whose maximum delayed scaling uses (None: all ranks); that
    of the outermost region counts, and an inner one that names another raises ValueError. The backward pass of a
    forward run inside uses the same recipe wherever it is called.

    At the exit of the outermost region the scales of DelayedScaling are updated, see `delayed`: those of the layers
    that ran under it inside, in training mode or calibrating. The ranks of the group must run the same layers in it.
    Where gradients are off at the exit (and nothing was calibrated), where nothing trained, and after an exception,
    there is no update and no communication: a rank may evaluate alone. Amaxes of such a forward pass are forgotten.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(calibrating, Recipe):
            raise TypeError("the recipe is a keyword argument: autocast(recipe=...); the second one is calibrating")
        given = _checked(True, recipe)
        self._recipe = given if enabled or calibrating else None
        self._calibrating = calibrating and not enabled
        self._group = amax_reduction_group
        self._previous: list[tuple[Any, ...]] = []  # one for each time that it is entered and not yet left

    def __enter__(self) -> Self:
        s = _STATE
        if s.depth > 0 and self._group is not None and self._group is not s.amax_reduction_group:
            raise ValueError(
                "amax_reduction_group is not that of the outermost autocast region, at whose exit all scales are "
                "updated; give it there"
            )
        self._previous.append((s.compute, s.calibrating, s.amax_reduction_group, s.touched))
        put_in_force(self._recipe)
        s.calibrating = self._calibrating
        if s.depth == 0:
            s.amax_reduction_group = self._group
            s.touched = [] if torch.compiler.is_compiling() else None
        s.depth += 1
        return self

    def __exit__(self, raised: type[BaseException] | None = None, *exc_info: object) -> None:
        # restored first: what follows may raise, and must not leave the recipe in force
        s, touched, group = _STATE, _STATE.touched, _STATE.amax_reduction_group
        s.depth -= 1
        recipe, s.calibrating, s.amax_reduction_group, s.touched = self._previous.pop()
        put_in_force(recipe)
        if s.depth == 0:
            from .delayed_update import leave_region

            leave_region(touched, group, failed=raised is not None)
        if raised is None and self._recipe is not None and self._recipe.by_name and not torch.compiler.is_compiling():
            self._recipe.check_names(lambda: [module.name for module in _live() if module.name])


class quantized_model_init(_Region):
    """Store the weights of layers built inside in the weight format of `recipe` (None: Float8CurrentScaling).

    preserve_high_precision_init_val: keep each initial value on the CPU; `parameter.get_high_precision_init_val()`
    returns it and `clear_high_precision_init_val()` frees it. `FusedAdamW` starts its float32 master from it, and frees
    it.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        super().__init__(
            storage=_checked(enabled, recipe), preserve_init_val=enabled and preserve_high_precision_init_val
        )


class microbatch(_Region):
    """Inside, layers whose `is_first_microbatch` is not given take it from here: True quantizes each weight and keeps
    the result, False uses what was kept, None quantizes without keeping.

    noop: with True, a scalar tensor, such as the one that `FusedAdamW.step` skipped the update by. Where it is nonzero
    a weight that was kept before stays as it is, decided on the device. Transformer Engine: `skip_fp8_weight_update`.

    Example:
        for i, batch in enumerate(micro_batches):
            with autocast(recipe=...), microbatch(first=i == 0):
                model(batch, labels=batch).loss.backward()
    """

    def __init__(self, first: bool | None, *, noop: Tensor | None = None) -> None:
        if noop is not None and not first:
            raise ValueError(f"noop is for the first micro-batch, which quantizes; first is {first}; allowed: True")
        super().__init__(first_microbatch=first, keep_kept=noop)


class collect_statistics(_Region):
    """Inside, layers under a recipe note amax, scale range, underflow and saturation of the operands they quantize.

    `quantization_statistics(model)` reads them. In eval mode nothing is noted.

    Every operand is quantized a second time for it, and what a pass notes replaces what was there: enter it for one
    pass in many, as training does.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(statistics=enabled)


def recompute_contexts(save: list[Any] | Callable[..., Any] | None = None) -> tuple[Any, Any]:
    """Return contexts for the first run and the recomputation of a region under `torch.utils.checkpoint`.

    The recomputation runs under the recipe and the scales of the first run, wherever backward is called, and records
    nothing a second time. Pass it as `checkpoint(..., use_reentrant=False, context_fn=recompute_contexts)`.

    In a compiled function it may be given, too. save: operators, or a policy function, whose results are kept and not
    computed again, as torch's `create_selective_checkpoint_contexts` takes them:
    `context_fn=functools.partial(recompute_contexts, [torch.ops.aten.mm.default])`.
    """
    from .recompute import contexts

    return contexts(save)
