"""Fill a live model's parameters from an open checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from te_models.config import ModelConfig
from te_models.layers import GroupedTensor, QuantizedTensor

from ..formats.numbers import check_scale_values
from ..io.errors import CheckpointError, shorten
from ..io.store import Store
from ..mapping.param_shapes import ExpertLayout, expected_tensors
from ..mapping.parameters import StoredParameters
from ..mapping.quantized_format import SUFFIXES
from ..mapping.rank_shards import WHOLE, ShardPlace, parts
from ..mapping.te_namespace import Formats
from ..mapping.tensor_map import Namespace


@torch.no_grad()
def load_params(
    store: Store,
    source: Namespace,
    config: ModelConfig,
    formats: Formats,
    params: Mapping[str, torch.Tensor],
    place: ShardPlace,
) -> None:
    """Fill `params` from `store`, whose tensors are as `source` says; formats: grouped names of quantized ones.

    place: `params` are the parts of the model that this rank owns, and only they are read.

    A quantized parameter takes over quantized values of the same format bit for bit; otherwise values are quantized, or
    dequantized, as the parameter needs, one GEMM's matrix at a time where they are in high precision.
    """
    layout = layout_of_names(params, config, "the names of the parameters to load")
    shapes = expected_tensors(config, layout)
    owned = parts(config, shapes, place)
    check_shapes(params, {name: owned[name].shape(shape) for name, shape in shapes.items()})
    stored = StoredParameters(store, source, config, formats, layout)
    per_gemm = cache(lambda: StoredParameters(store, source, config, formats, "per-gemm"))
    for name, param in params.items():
        part = owned[name]
        if name in stored.formats:
            value = stored.quantized(name, part)
            if place != WHOLE:  # a whole model's parameters have been checked before anything was filled
                _check_scales(name, value)
            param.copy_(value if isinstance(param, QuantizedTensor) else value.dequantize(param.dtype))
        elif isinstance(param, GroupedTensor):
            first = 0 if part.experts is None else part.experts[0]
            for g, member in enumerate(param.members(), first):
                member.copy_(per_gemm().entry(f"{name}{g}", part.member().cuts()))
        elif isinstance(param, QuantizedTensor):
            param.copy_(stored.entry(name, part.cuts()))
        else:
            stored.fill_part(name, part.cuts(), param)


def _check_scales(name: str, value: QuantizedTensor) -> None:
    for field, scales in value.fields.items():
        if not field.endswith(("_data", "_zero_point")):
            check_scale_values(name + SUFFIXES[field], scales, signed=value.quantizer.SIGNED_SCALES)


def check_shapes(params: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError naming the first tensor that does not have its expected shape."""
    for name, shape in shapes.items():
        if tuple(params[name].shape) != shape:
            raise CheckpointError(f"the model's {name} has shape {list(params[name].shape)}; expected: {list(shape)}")


def layout_of_names(names: Mapping[str, Any], config: ModelConfig, what: str) -> ExpertLayout:
    """Return which layout a model's parameter names are in; names that are in neither raise CheckpointError."""
    layouts: tuple[ExpertLayout, ...] = ("grouped", "per-gemm")
    closest = min(layouts, key=lambda layout: len(set(names) ^ set(expected_tensors(config, layout))))
    expected = expected_tensors(config, closest)
    missing, extra = [n for n in expected if n not in names], [n for n in names if n not in expected]
    problems = [f"{label}: {shorten(found)}" for label, found in (("missing", missing), ("unknown", extra)) if found]
    if problems:
        raise CheckpointError(f"{what} do not match the configuration: {'; '.join(problems)}")
    return closest
