"""Bounds on what a configuration may claim before anything is computed from it.

A configuration decides how many tensors are expected, so a hostile one could ask for a list of 10^9 layers. The bounds
are far above any model, and the files must then hold exactly that many tensors anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import CheckpointError, shorten

MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000
MAX_STRANGERS = 20_000
"""Tensors that a model does not use, such as layers that predict further tokens: 256 experts with scales are 1,536."""


def check_counts(layers: object, experts: object = None) -> None:
    """Raise CheckpointError if a configuration claims more layers, or experts in all layers, than any model has."""
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise CheckpointError(f"the configuration claims {_short(layers)} layers; at most {MAX_LAYERS} are supported")
    if isinstance(layers, int) and isinstance(experts, int) and layers * experts > MAX_EXPERTS:
        raise CheckpointError(
            f"the configuration claims {_short(experts)} experts in {layers} layers; at most {MAX_EXPERTS} in all"
        )


def check_strangers(names: Sequence[str], where: str) -> None:
    """Raise CheckpointError if there are more tensors outside of the configuration than any model carries."""
    if len(names) > MAX_STRANGERS:
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: not part of this model: {shorten(names)}"
        )


def _short(number: int) -> str:
    return str(number) if number < 10**18 else "more than 10^18"
