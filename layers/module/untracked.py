"""What layers write down about themselves while they run, also inside an activation checkpoint that is compiled.

The compiler refuses such writing there, since the recomputation would not repeat it. It need not: it would write the
same recipe, and must not draw a second key. Only what goes through `untracked_side_effect` is let through; what else a
checkpointed function writes, a user's own for example, is refused as before, whatever compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_models.kernels.compiling import compiling


def untracked_side_effect(write: Callable[..., None], *arguments: Any) -> None:
    """Call `write(*arguments)`, which sets attributes; in a graph, once for each call of it and not again in the
    backward pass."""
    if compiling():
        from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as let_through

        let_through(write, *arguments)
    else:
        write(*arguments)
