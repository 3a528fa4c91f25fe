"""Elements of the mathematics that a declaration can turn on and off: every field of ModelConfig's parts."""

import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal

from ..config import (
    AttentionConfig,
    EmbeddingConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
)
from .pool import from_paths

PARTS: dict[str, Any] = {
    "": ModelConfig,
    "norm.": NormConfig,
    "embedding.": EmbeddingConfig,
    "mlp.": MLPConfig,
    "moe.": MoEConfig,
    "moe.router.": RouterConfig,
    "attention.": AttentionConfig,
    "rope.": RopeConfig,
}
_SIZES = {
    *("vocab_size", "hidden_size", "num_layers", "max_position_embeddings", "mtp_num_layers"),
    *("attention.num_attention_heads", "mlp.ffn_hidden_size", "moe.num_moe_experts", "moe.moe_ffn_hidden_size"),
}
_OF_TRAINING = (
    "dropout",
    "loss_coeff",
    "load_balancing",
    "capacity",
    "drop_policy",
    "init_method",
    "mtp_loss",
    "padding_idx",
    "dtype",
    "cast_order",  # which decides the rounding of 16 bits alone
)


def options(numbers: Mapping[str, float]) -> Iterator[tuple[str, list[Any]]]:
    """Yield path -> the values that it can have: of flags and words all; of numbers those that follow from `numbers`,
    the numbers of config.json."""
    for prefix, part in PARTS.items():
        hints = typing.get_type_hints(part)
        for f in fields(part):
            path = prefix + f.name
            if path in _SIZES or any(word in path for word in _OF_TRAINING) or f.name.startswith("_"):
                continue
            values = list(_values(hints[f.name], f.default, _fitting(path, numbers)))
            if len(values) > 1:
                yield path, values


_ONLY = {
    "rope.rotary_base": re.compile("theta|base"),
    "norm.layernorm_epsilon": re.compile("eps"),
    "moe.router.normalize_eps": re.compile("eps"),
    "rope.rotary_percent": re.compile("partial|pct|percent|rotary"),
}
_NEVER = re.compile(
    "theta|base|eps|partial|pct|token|range|vocab|position|layers|drop|std|coef|loss|inter|window|n_inner"
)


def _fitting(path: str, numbers: Mapping[str, float]) -> Mapping[str, float]:
    """Return the numbers whose fields may mean a path, by their names."""
    only = _ONLY.get(path)
    return {how: n for how, n in numbers.items() if (only.search(how) if only else not _NEVER.search(how))}


def _values(hint: Any, default: Any, numbers: Mapping[str, float]) -> Iterator[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(args, key=lambda option: option is float):  # a word, as it holds for all sizes, is first
            if option is type(None):
                yield None
            else:
                yield from _values(option, default, numbers)
    elif origin is Literal:
        yield from args
    elif hint is bool:
        yield from (False, True)
    elif hint is float:
        if default is not None and isinstance(default, float):
            yield default
        yield from numbers.values()


CONVERSIONS: dict[str, Any] = {
    "": lambda v: v,
    "1 / x": lambda v: 1 / v,
    "x ** -0.5": lambda v: v**-0.5,
    "x ** 0.5": math.sqrt,
}
"""What a number of ours may be of a number of theirs."""


def derived_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what numbers of a configuration, and what follows from them, may mean: how it follows -> number."""
    found: dict[str, float] = {}
    flat = dict(values)
    for outer, inner in values.items():
        if isinstance(inner, Mapping):
            flat |= {f"{outer}.{name}": value for name, value in inner.items()}
    for name, value in flat.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9 or "token" in name:
            continue
        for how, convert in CONVERSIONS.items():
            number = float(convert(float(value)))
            if number not in found.values():
                found[f"{name}:{how}"] = number
    return found


def usual_paths() -> dict[str, Any]:
    """Return the defaults of ModelConfig's parts."""
    small = from_paths(
        {
            "vocab_size": 8,
            "hidden_size": 8,
            "num_layers": 1,
            "max_position_embeddings": 8,
            "attention.num_attention_heads": 1,
            "mlp.ffn_hidden_size": 8,
            "moe.num_moe_experts": 2,
            "moe.moe_router_topk": 1,
            "moe.moe_ffn_hidden_size": 8,
        }
    )
    return dict(_flat(small.to_dict()))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
