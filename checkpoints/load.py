"""Fill a live model's parameters from an open checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from te_models.config import ModelConfig
from te_models.layers import GroupedTensor, QuantizedTensor

from .errors import CheckpointError, shorten
from .links import Namespace
from .naming import ExpertLayout, expected_tensors
from .parameters import Parameters
from .parts import Part, parts
from .store import Store
from .te_namespace import Formats


@torch.no_grad()
def load_params(
    store: Store,
    source: Namespace,
    config: ModelConfig,
    formats: Formats,
    params: Mapping[str, torch.Tensor],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Fill `params` from `store`, whose tensors are as `source` says; formats: grouped names of quantized ones.

    rank, ranks: `params` are the parts of the model that this rank owns, and only they are read.

    A quantized parameter takes over quantized values of the same format bit for bit; otherwise values are quantized, or
    dequantized, as the parameter needs, one GEMM's matrix at a time where they are in high precision.
    """
    layout = layout_of(params, config, "the names of the parameters to load")
    shapes = expected_tensors(config, layout)
    owned = parts(config, shapes, rank, ranks)
    check_shapes(params, {name: owned[name].shape(shape) for name, shape in shapes.items()})
    stored = Parameters(store, source, config, formats, layout)
    per_gemm = cache(lambda: Parameters(store, source, config, formats, "per-gemm"))
    for name, param in params.items():
        if owned[name].dim is not None:
            _fill_part(stored, name, owned[name], param)
        elif name in stored.formats:
            value = stored.quantized(name)
            param.copy_(value if isinstance(param, QuantizedTensor) else value.dequantize(param.dtype))
        elif isinstance(param, GroupedTensor):
            for member, member_name in zip(param.members(), stored.members(name), strict=True):
                member.copy_(per_gemm().entry(member_name))
        elif isinstance(param, QuantizedTensor):
            param.copy_(stored.entry(name))
        else:
            stored.fill(name, param)


def _fill_part(stored: Parameters, name: str, part: Part, param: torch.Tensor) -> None:
    if name in stored.formats or isinstance(param, QuantizedTensor):
        raise CheckpointError(
            f"{name} is quantized and cannot be loaded in parts; load without a recipe, or dequantize the folder"
        )
    assert part.dim is not None, "whole parameters are not filled in parts"
    offset = 0
    for begin, end in part.ranges:
        stored.fill_range(name, part.dim, begin, end, param.narrow(part.dim, offset, end - begin))
        offset += end - begin


def check_shapes(params: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError naming the first tensor that does not have its expected shape."""
    for name, shape in shapes.items():
        if tuple(params[name].shape) != shape:
            raise CheckpointError(f"the model's {name} has shape {list(params[name].shape)}; expected: {list(shape)}")


def layout_of(names: Mapping[str, Any], config: ModelConfig, what: str) -> ExpertLayout:
    """Return which layout a model's parameter names are in; names that are in neither raise CheckpointError."""
    layouts: tuple[ExpertLayout, ...] = ("grouped", "per-gemm")
    closest = min(layouts, key=lambda layout: len(set(names) ^ set(expected_tensors(config, layout))))
    expected = expected_tensors(config, closest)
    missing, extra = [n for n in expected if n not in names], [n for n in names if n not in expected]
    problems = [f"{label}: {shorten(found)}" for label, found in (("missing", missing), ("unknown", extra)) if found]
    if problems:
        raise CheckpointError(f"{what} are not those of the configuration: {'; '.join(problems)}")
    return closest
