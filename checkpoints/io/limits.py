"""Bounds on what a configuration may claim before anything is computed from it.

A configuration decides how many tensors are expected, so a hostile one could ask for a list of 10^9 layers. The bounds
are far above any model. Within them the files must hold as many tensors as the layers and experts at least have, which
is compared before the first name is made: the work is bounded by what the files hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from te_models.config import ModelConfig
from te_models.config.model import MAX_LAYERS

from .errors import CheckpointError, shorten

MAX_EXPERTS = 100_000
"""Experts in all layers; 384 in 60 layers are 23,040."""
_PER_LAYER = 4
"""Tensors that every layer has, in any form: two of its attention, two of its MLP or experts."""
_PER_EXPERT = 2
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


def check_held(config: ModelConfig, held: int, where: str, *, experts_apart: bool) -> None:
    """Raise CheckpointError if the files hold fewer tensors than the layers of the model have at least.

    held: how many. experts_apart: every expert has tensors of its own.
    """
    if held < _PER_LAYER * config.num_layers:
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: it claims {config.num_layers} layers, which have "
            f"{_PER_LAYER} tensors each at least, and the files hold {held}"
        )
    if experts_apart and not holds_experts(config, held):
        assert config.moe is not None, "only experts can be missing here"
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: it claims {config.moe.num_moe_experts} experts in a "
            f"layer, which have {_PER_EXPERT} tensors each at least, and the files hold {held}"
        )


def holds_experts(config: ModelConfig, held: int) -> bool:
    """Whether so many tensors can be those of a model whose experts have tensors of their own."""
    if config.moe is None:
        return True
    layers = config.num_layers if config.moe.layers is None else len(config.moe.layers)
    return held >= _PER_EXPERT * layers * config.moe.num_moe_experts


def check_strangers(names: Sequence[str], where: str) -> None:
    """Raise CheckpointError if there are more tensors outside of the configuration than any model carries."""
    if len(names) > MAX_STRANGERS:
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: not part of this model: {shorten(names)}"
        )


def _short(number: int) -> str:
    return str(number) if number < 10**18 else "more than 10^18"
