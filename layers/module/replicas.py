"""Copies of a layer that `nn.DataParallel` runs in threads of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..recipe.context import state
from ..recipe.recipe_use import RecipeUse

if TYPE_CHECKING:
    from .base import QuantizedModule

M = TypeVar("M", bound="QuantizedModule")
_INSTEAD = "allowed: DistributedDataParallel, a process for each device"


def as_replica(copied: M) -> M:
    """Return a copy that `nn.DataParallel` has made, as one that computes in high precision, and under a recipe without
    state whose region the model's own forward opens. RuntimeError where a region is in force now: not in its threads.

    The copy lives for one call, in another thread, perhaps on another device. What it would write is lost or races with
    the other copies, so it refuses the recipes, the calibration and the statistics that write.
    """
    if state().compute is not None:
        raise RuntimeError(
            "nn.DataParallel runs its copies in threads where the autocast region around it is not in force; allowed: "
            "a region inside the model's forward, or DistributedDataParallel, a process for each device"
        )
    made = type(copied)
    values = copied.__dict__
    values["recipe_use"], values["delayed_rule"] = RecipeUse(), None

    def live_state(quantizers: Any) -> Any:
        live = made.live_state(copied, quantizers)
        if any(tensor is not None for tensor in live):
            raise RuntimeError(
                "a copy made by nn.DataParallel keeps no state, which DelayedScaling, stochastic rounding in training "
                f"and collect_statistics need; {_INSTEAD}"
            )
        return live

    def calibrating() -> bool:
        if made.calibrating(copied):
            raise RuntimeError(f"a copy made by nn.DataParallel keeps no state, which a calibration needs; {_INSTEAD}")
        return False

    values["live_state"], values["calibrating"] = live_state, calibrating
    return copied
