"""Activation checkpointing with Transformer Engine's arguments."""

from collections.abc import Callable
from typing import Any

from ..recipe.activation_checkpoint import checkpointed
from .arguments import require_default


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`, saving only the arguments for the backward pass, in which it runs again.

    It repeats the first run under its recipe and scales. Transformer Engine: `te.checkpoint`. Gradients do not depend
    on use_reentrant (they are made without reentry), nor on tp_group. get_rng_state_tracker: a function that returns a
    tracker of random states; the second run starts from the states of the first. ValueError where saved activations are
    to be distributed, for a tracker in a compiled graph, and for a context_fn.
    """
    require_default("distribute_saved_activations", distribute_saved_activations, False)
    if "context_fn" in kwargs:
        raise ValueError("context_fn is given; use torch.utils.checkpoint with recompute_contexts(save)")
    return checkpointed(function, *args, get_rng_state_tracker=get_rng_state_tracker, **kwargs)
