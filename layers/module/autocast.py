"""The recipe in force: `autocast` for what layers compute, `quantized_model_init` for what they store.

In force in the thread that opens the region, and in no other, see `context`. The context managers nest, also one object
in itself, and the compiler follows those opened inside a compiled function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.suggestions import shown

from ..collectives import check_group
from ..recipe.base import Recipe
from ..recipe.context import Region, state
from ..recipe.recipe_use import live_modules, put_in_force
from ..recipe.recipes import Float8CurrentScaling

if TYPE_CHECKING:
    import torch.distributed as dist


def current_recipe() -> Recipe | None:
    """Return the recipe layers run under now, or None."""
    return state().compute


def storage_recipe() -> Recipe | None:
    """Return the recipe whose weight format new layers store their weights in, or None."""
    return state().storage


def _checked(enabled: bool, recipe: Recipe | None) -> Recipe | None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {shown(recipe)}; allowed: a Recipe such as MXFP8BlockScaling(), or None")
    if not enabled:
        return None
    return Float8CurrentScaling() if recipe is None else recipe


class autocast(Region):
    """Run the layers inside under `recipe` (None: Float8CurrentScaling).

    enabled=False: high precision. calibrating: high-precision layers record amaxes for a later run under
    DelayedScaling. amax_reduction_group: the process group whose maximum delayed scaling uses (None: all ranks); that
    of the outermost region counts, and an inner one that names another raises ValueError. The backward pass of a
    forward run inside uses the same recipe wherever it is called, in another thread, too.

    In force in this thread only, as `torch.amp.autocast` is: a thread that is started inside begins in high precision
    and has to open another region. Tasks of an event loop share the thread's.

    At its exit the outermost region updates the scales of DelayedScaling (see `delayed`) of all layers that ran under
    that recipe inside, in training mode or calibrating. The ranks of the group must run the same layers in it. Where
    gradients are off at the exit (and nothing was calibrated), where nothing trained, and after an exception, there is
    no update and no communication: a rank may evaluate alone. Amaxes of such a forward pass are forgotten.
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
        if amax_reduction_group is not None:
            check_group("amax_reduction_group", amax_reduction_group)
        checked = _checked(True, recipe)
        self._recipe = checked if enabled or calibrating else None
        self._calibrating = calibrating and not enabled
        self._group = amax_reduction_group
        super().__init__()

    def __enter__(self) -> Self:
        s = state()
        group, touched = s.amax_reduction_group, s.touched
        if s.depth == 0:
            group, touched = self._group, [] if torch.compiler.is_compiling() and compiling() else None
        elif self._group is not None and self._group is not group:
            raise ValueError(
                "amax_reduction_group is not the outermost autocast region's, at whose exit all scales are "
                "updated; give it there"
            )
        recipe = self._recipe
        if recipe is not None and recipe.stands_for is not None:
            recipe = recipe.stands_for()
        values: dict[str, Any] = {"compute": recipe, "calibrating": self._calibrating}
        values["amax_reduction_group"], values["touched"] = group, touched
        self._enter(values)
        put_in_force(recipe)
        s.depth += 1
        return self

    def __exit__(self, raised: type[BaseException] | None = None, *exc_info: object) -> None:
        # left first: what follows may raise, and must not leave the recipe in force
        entry = self._last_entry()
        s = entry.of
        touched, group = s.touched, s.amax_reduction_group
        self._undo(entry)
        s.depth -= 1
        if s is not state():
            s.chosen = s.by_region = False  # each layer looks it up where it runs
            return
        put_in_force(s.compute)
        if s.depth == 0:
            from .delayed_scaling import leave_region

            leave_region(touched, group, failed=raised is not None)
        if raised is None and self._recipe is not None and self._recipe.by_name and not compiling():
            self._recipe.check_names(lambda: [module.name for module in live_modules() if module.name])


class quantized_model_init(Region):
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

    def __enter__(self) -> Self:
        recipe = self._values["storage"]
        if recipe is None or recipe.stands_for is None:
            return super().__enter__()
        self._enter(self._values | {"storage": recipe.stands_for()})
        return self


class microbatch(Region):
    """Set `is_first_microbatch` for layers inside that are called without it: True quantizes and caches each weight,
    False uses the cached weight, None quantizes without caching.

    noop: with first=True, a scalar tensor, such as the flag by which `FusedAdamW.step` skipped the update. If it is
    nonzero, a weight that was cached before stays unchanged; the device decides. Raises ValueError for noop with
    another value of `first`.

    Example:
        for i, batch in enumerate(micro_batches):
            with autocast(recipe=...), microbatch(first=i == 0):
                model(batch, labels=batch).loss.backward()
    """

    def __init__(self, first: bool | None, *, noop: Tensor | None = None) -> None:
        if noop is not None and not first:
            raise ValueError(f"noop is for the first micro-batch, which quantizes; first is {first}; allowed: True")
        super().__init__(first_microbatch=first, noop=noop)


class collect_statistics(Region):
    """Inside, layers under a recipe note amax, scale range, underflow and saturation of the operands they quantize.

    `quantization_statistics(model)` reads them. In eval mode nothing is noted.

    Every operand is quantized a second time for it, and what a pass notes replaces what was there: enter it for one
    pass in many, as training does.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(statistics=enabled)
